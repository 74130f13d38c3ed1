"""`python -m rlexp.generate`: show answers of a trained model beside those of the model that it started from."""

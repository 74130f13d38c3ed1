"""`python -m rlexp.eval`: evaluate a model, or a checkpoint, on held-out rows without training it."""

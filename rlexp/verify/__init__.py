"""`rlexp.verify`: a configuration's first steps, beside its plainest self and beside transformers alone."""

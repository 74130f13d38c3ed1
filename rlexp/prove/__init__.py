"""Proof that the ring size is a free parameter: the same run on many layouts, side by side."""

"""Losses: arithmetic on log-probabilities, independent of rings, engines and tokenizers."""

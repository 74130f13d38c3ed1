"""Losses: arithmetic on log-probabilities. They know nothing of rings, engines or tokenizers."""

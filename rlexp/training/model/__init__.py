"""Models of transformers: loading, the attention hook, per-token log-probabilities, the probe."""

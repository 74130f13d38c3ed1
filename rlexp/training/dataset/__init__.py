"""From files to train batches: rows, tokens, and their order."""

"""From files to packs: rows, tokens, train batches, packing."""

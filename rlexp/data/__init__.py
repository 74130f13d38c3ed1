"""From files to packs: rows, tokens, global batches, packing."""

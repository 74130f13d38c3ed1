"""What survives a run: written by all ranks, independent of their layout, whole or not there."""

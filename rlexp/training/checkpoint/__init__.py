"""Checkpoints: written by all ranks, independent of their layout, and either whole or absent."""

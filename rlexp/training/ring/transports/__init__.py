"""Transports: how keys and values reach the ranks whose queries see them, and how their gradients come home."""

"""Rings of ranks: groups, layouts, block kernels, the exchange and its collectives."""

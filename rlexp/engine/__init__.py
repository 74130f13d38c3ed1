"""Engines: what holds the weights, adds up gradients and steps. One small interface, one file each."""

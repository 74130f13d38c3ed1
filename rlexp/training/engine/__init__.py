"""Engines hold the weights, accumulate gradients and step the optimizer. One interface, one file each."""

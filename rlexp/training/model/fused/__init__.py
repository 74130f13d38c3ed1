"""What a model computes between its matrix products, each piece read and written once: `model.fused`."""

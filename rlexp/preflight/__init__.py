"""Rehearsal: a run's own step on tensors that have a shape, a dtype and a device but no memory."""

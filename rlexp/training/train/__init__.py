"""The way of a train batch: build once, step, loop."""

"""Sinks: rank 0 sends its rows to a file, the terminal and W&B."""

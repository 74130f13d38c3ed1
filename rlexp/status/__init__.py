"""The state of a folder's jobs, read from outside without leaving a trace. No torch."""

"""Slurm: what it is sent, what it knows, where the ranks of a job meet, and what follows when one has ended."""

"""Slurm: write batch scripts, ask the queue, let the ranks of a job meet, and judge a job when its ranks are gone."""

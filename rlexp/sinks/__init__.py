"""Where rows go: a file, the terminal, W&B. Rank 0 only."""

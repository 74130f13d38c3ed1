"""The files of a run: its rows, rollouts and checkpoints, and how far two curves lie apart. No torch."""

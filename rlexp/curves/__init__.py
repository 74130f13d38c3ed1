"""What a run leaves behind: its rows and rollouts as files, and how two runs' values are compared. No torch."""

"""The ranks of a run as replicas of rings, and the small objects that ranks exchange."""

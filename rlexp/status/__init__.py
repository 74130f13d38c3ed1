"""How the jobs of a folder are doing, seen from outside: it reads, and leaves no trace. No torch."""

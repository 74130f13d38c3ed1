"""Named values with their reduction, memory peaks, and the one reduction of a step."""

"""Metrics: named values, memory peaks, and the one reduction of a step."""

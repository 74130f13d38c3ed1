"""Reading runs back, curves side by side, and the report. No torch."""

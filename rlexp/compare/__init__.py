"""Reading runs, their curves side by side, and the report of how far they lie apart."""

"""Schema, resolvers and the checks across fields. Imports no torch: `--help` must answer at once."""

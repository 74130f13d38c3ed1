"""The schema, its resolvers and checks. Nothing here imports torch, so that `--help` answers at once."""

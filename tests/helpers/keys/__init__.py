"""Every key of the schema with its default, its range and its meaning, as docs/keys.md and the yaml files of losses and
rings show them. `python -m tests.helpers.keys` writes them."""

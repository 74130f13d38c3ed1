"""Programs run by hand, as `python -m bench.NAME`: their tables and pictures stand in docs/."""

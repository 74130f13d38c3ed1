"""Second readers: rows, templates, masks, orders and reward rules, written again from the documentation for tests."""

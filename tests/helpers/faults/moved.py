"""The defects that a layout moves, each with the settings that `verify` must name."""

MOVED: dict[str, str] = {}

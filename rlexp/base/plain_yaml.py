"""Read yaml that anybody may have written: plain values alone, and no small file that becomes large or never ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MOST_VALUES = 100_000  # with each alias as often as it stands there
MOST_BITS = 4096  # of a whole number
DEEPEST = 100  # mappings and lists in each other


class TooLarge(yaml.YAMLError):
    """A file that has too many values, or too deep ones."""


class Loader(yaml.SafeLoader):
    """A loader that counts values before it makes them."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        self._depth = getattr(self, "_depth", 0) + 1
        if self._depth > DEEPEST:
            raise TooLarge(f"its values are more than {DEEPEST} levels deep")
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_document(self, node: yaml.Node) -> Any:
        if _values_of(node, {}) > MOST_VALUES:
            raise TooLarge(f"with its aliases it has more than {MOST_VALUES:,} values")
        return super().construct_document(node)

    def whole_number(self, node: yaml.ScalarNode) -> int:
        value = self.construct_yaml_int(node)
        if value.bit_length() > MOST_BITS:  # Python does not write it as text
            raise TooLarge(f"a number has more than {MOST_BITS} bits")
        return int(value)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.whole_number)


def load(text: str, loader: type[Loader] = Loader) -> Any:
    """Return the values of a text. A `YAMLError` says why there are none."""
    try:
        return yaml.load(text, loader)
    except (ValueError, TypeError, OverflowError, AttributeError) as error:  # what its tag cannot be, such as a date
        raise yaml.YAMLError(str(error)) from None


def mapping_in(file: Path) -> dict[str, Any]:
    """Return a file's values; none if it is not there, cannot be read, or holds something else."""
    try:
        body = load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return body if isinstance(body, dict) else {}


def _values_of(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values a node has, with all below it. A node within itself has no end."""
    if id(node) in known:
        return known[id(node)]
    known[id(node)] = MOST_VALUES + 1  # until it is counted: whoever asks stands below it
    below = []
    if isinstance(node, yaml.MappingNode):
        below = [each for pair in node.value for each in pair]
    elif isinstance(node, yaml.SequenceNode):
        below = node.value
    known[id(node)] = 1 + sum(_values_of(each, known) for each in below)
    return known[id(node)]

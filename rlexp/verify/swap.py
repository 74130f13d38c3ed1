"""Which settings are at fault: the smallest set that, added to the plain run, makes the difference.

The settings in which the user's run differs from its plain run are halved until the set is found. From the plain side,
since put back into the user's run either half of a pair would hide the difference. A step is reached by running those
before it again; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

Fails = Callable[[Sequence[str]], bool]  # whether the plain run with these settings differs from the plain run


@dataclass
class SettingsSearch:
    """A search for settings at fault, and which sets it knows to fail."""

    fails: Fails
    closed: Callable[[Sequence[str]], set[str]]  # settings with those that they need
    known: dict[frozenset[str], bool] = field(default_factory=dict)

    def at_fault(self, settings: Sequence[str]) -> list[str]:
        """Return the smallest set that makes the difference which all settings together make."""
        order = list(settings)
        names = set(self._least(order, []))
        for name in sorted(names, key=order.index):
            others, needed = names - {name}, self.closed([name]) - {name}
            if needed and self._try([*others, *needed]):  # what it needs is enough
                names = others | set(self._least(sorted(needed, key=order.index), sorted(others)))
        return sorted(names, key=order.index)

    def _try(self, names: Sequence[str]) -> bool:
        key = frozenset(self.closed(names))
        if any(key <= other and not failed for other, failed in self.known.items()):
            return False  # it agrees with more than these
        if key not in self.known:
            self.known[key] = self.fails(sorted(key))
        return self.known[key]

    def _least(self, names: list[str], others: list[str]) -> list[str]:
        """Return the part of `names` that makes the difference, together with `others` that are there in any case."""
        if len(names) == 1:
            return names
        one, two = names[: len(names) // 2], names[len(names) // 2 :]
        for half in (one, two):
            if self._try([*half, *others]):
                return self._least(half, others)
        return [*self._least(one, [*two, *others]), *self._least(two, [*one, *others])]

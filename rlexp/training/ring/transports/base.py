"""The interface of a transport, and the sums of gradients that have come home.

Shape letters: t tokens of this rank, G key/value heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlexp.training.ring.kernels.base import BlockKernel, Call, accumulation_dtype
from rlexp.training.ring.kernels.fused import add_keys
from rlexp.training.ring.selection import Rows, covers

ALL = slice(None)  # heads
KeyGrads = tuple[Call, Tensor, Tensor]  # a call, and its dk and dv


class Arrived(NamedTuple):
    """Keys and values of some heads that are here: at step 0 the rank's own, later what other ranks sent."""

    heads: slice
    step: int
    keys: Tensor
    values: Tensor


class Transport(ABC):
    """How keys and values of one pack, for one window, reach a rank; and how their gradients come home."""

    def ready(self, x_tGD: Tensor) -> Tensor:
        """Arrange keys or values in memory so that rows can be sent as they are."""
        return x_tGD

    @abstractmethod
    def keys(self, k_tGD: Tensor, v_tGD: Tensor) -> Iterator[Arrived]:
        """Yield what arrives. While a step is computed, the next one's rows are on their way."""

    @abstractmethod
    def home(self, k_tGD: Tensor, v_tGD: Tensor, kernel: BlockKernel) -> Home: ...

    @abstractmethod
    def to(self, device: torch.device) -> Transport: ...


class Home(ABC):
    """Brings gradients of keys and values to the ranks that hold the tokens, and adds them there, in a fixed order.

    They are widened when there is a second summand.
    """

    def __init__(self, k_tGD: Tensor, v_tGD: Tensor) -> None:
        self.like, self.wide = (k_tGD, v_tGD), accumulation_dtype(k_tGD.dtype)
        self.own: tuple[Tensor, Tensor] | None = None

    @abstractmethod
    def add(self, heads: slice, step: int, grads: Sequence[KeyGrads]) -> None:
        """Take the gradients of what arrived at a step. It is called once for each `Arrived`, in the same order."""

    @abstractmethod
    def wait(self) -> None:
        """Wait for what is still on its way."""

    def total(self) -> tuple[Tensor, Tensor]:
        self.wait()
        return self.own if self.own is not None else self._widened()

    def keep(self, rows: Rows, dk: Tensor, dv: Tensor, heads: slice = ALL, *, once: bool = True) -> None:
        """Add gradients of the rank's own rows; `once` says that none stands twice among them."""
        if self.own is None and heads == ALL and covers(rows, len(self.like[0])):
            self.own = (dk, dv)
            return
        self.own = own_dk, own_dv = self._widened()
        add_keys(own_dk[:, heads], own_dv[:, heads], rows, dk, dv, once=once)

    def _widened(self) -> tuple[Tensor, Tensor]:
        if self.own is None:
            dk, dv = (x.new_zeros(x.shape, dtype=self.wide) for x in self.like)
        else:
            dk, dv = (x.to(self.wide) for x in self.own)
        return dk, dv

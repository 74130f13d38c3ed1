"""Record the dtypes in which tensors are added up, and those of what ranks send each other.

A result that is laid into zeros is no sum: nothing is rounded a second time. A product of matrices is one sum to the
kernel that computes it, which no operator shows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

INTO = ("add_", "sub_", "index_add_", "scatter_add_", "addmm_", "lerp_")  # into their first argument
OVER = ("add", "sum", "mean", "cumsum", "logsumexp", "logaddexp", "index_add", "linalg_vector_norm")
WIDE = (torch.float32, torch.float64)


class Sums(TorchDispatchMode):
    """`made` counts elements by operator and dtype: of the sums, and of the tensors that collectives are given.

    A mode is its thread's, and that of the backward passes begun there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[tuple[str, torch.dtype]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        space, _, name = func._schema.name.partition("::")
        given = [args] if space == "c10d" else [args[0]] if name in INTO and _holds(name, args) else []
        self._note(name, given)
        result = func(*args, **(kwargs or {}))
        self._note(name, [result] if name in OVER else [])
        return result

    def _note(self, name: str, given: Any) -> None:
        for tensor in tree_leaves(given):
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                self.made[name, tensor.dtype] += tensor.numel()

    def narrow(self, *words: str) -> Counter[tuple[str, torch.dtype]]:
        """Return what was added up in less than float32, or with `words` by the operators that have one in their
        names."""
        names = [name for name, _ in self.made if any(word in name for word in words or (*INTO, *OVER, "reduce"))]
        return Counter({key: n for key, n in self.made.items() if key[0] in names and key[1] not in WIDE})


def _holds(name: str, args: Any) -> bool:
    """Say whether the places that are added to hold something already, or are added to twice."""
    into = args[0]
    if name == "index_add_":
        dim, index = args[1:3]
        return len(index.unique()) < len(index) or bool(into.index_select(dim, index).any())
    return bool(into.any())

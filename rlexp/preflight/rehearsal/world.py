"""A world of ranks in which nothing is sent."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch.distributed as dist

from rlexp.preflight.rehearsal.device import rehearsed_device


@contextlib.contextmanager
def joined(rank: int, ranks: int) -> Iterator[None]:
    """Make this process a rank of a world in which nothing is sent."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    name = rehearsed_device().type
    before = os.environ.get("LOCAL_RANK")
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group(f"cpu:fake,{name}:fake", rank=rank, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        if before is None:
            del os.environ["LOCAL_RANK"]
        else:
            os.environ["LOCAL_RANK"] = before

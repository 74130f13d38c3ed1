"""The GPUs of this machine, as the programs that measure them need to know them."""

from __future__ import annotations

import platform
import re
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlexp.config.hardware import hardware_here, visible_gpus

if TYPE_CHECKING:
    from rlexp.launch.local import RankFailed

GIB = 1 << 30
UNKNOWN = "h100"  # whose data sheet stands in for that of a GPU that conf/hardware does not describe


@dataclass(frozen=True)
class Machine:
    """GPUs of one kind, or CPU ranks that stand in for them. Whoever makes it has no CUDA context afterwards."""

    device: str  # cuda or cpu
    name: str
    gpus: int
    memory: int  # bytes of one, as torch reports them
    torch: str
    driver: str
    hardware: str  # the option of `hardware` that describes it
    known: bool  # or stands in for it

    @property
    def ring(self) -> int:
        """The largest ring that is a power of two."""
        return 1 << (self.gpus.bit_length() - 1)

    @property
    def words(self) -> tuple[str, ...]:
        """Overrides by which runs are predicted on it."""
        reserve = ("hardware.reserve_gib=0",) if self.device == "cpu" else ()
        return (f"hardware={self.hardware}", f"hardware.memory_gib={self.memory / GIB:.4f}", *reserve)

    def about(self) -> str:
        stands = "" if self.known else f"; conf/hardware does not describe it: predicted as {self.hardware}"
        return (
            f"{self.gpus} × {self.name} ({self.memory / GIB:.1f} GiB{stands}), driver {self.driver}, torch "
            f"{self.torch}, Python {platform.python_version()}"
        )


def missing(*, ask_torch: bool = True) -> str | None:
    """Say in one line why no GPU can be measured here; None if one can."""
    if not visible_gpus():
        return "no GPU is visible on this machine (nvidia-smi lists none, or CUDA_VISIBLE_DEVICES hides them)"
    if not ask_torch:
        return None
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA: install a build for CUDA beside this machine's GPU"
    return None


def machine() -> Machine:
    """Ask a process of its own, so that this one keeps no memory of a GPU. A GPU that torch cannot use ends the
    program with one message."""
    from rlexp.launch.local import RankFailed, run_ranks

    try:
        (facts,) = run_ranks(_facts, 1, device="cuda", timeout=300.0)
    except RankFailed as failed:
        raise SystemExit(_unusable(failed)) from None
    option = hardware_here()
    return Machine("cuda", gpus=visible_gpus(), driver=_driver(), hardware=option or UNKNOWN, known=bool(option),
                   **facts)  # fmt: skip


def _unusable(failed: RankFailed) -> str:
    """Say in one line why torch cannot use the GPU: the last error of the process that asked."""
    errors = re.findall(r"^(?:[\w.]+(?:Error|Exception): .+)$", str(failed), re.MULTILINE)
    said = errors[-1] if errors else next(iter(str(failed).splitlines()), "")
    return (
        f"torch cannot use the GPU that nvidia-smi lists: {said}. Driver: {_driver()}. If torch is built for a newer "
        f"CUDA than the driver knows, update the driver, or install another build of torch"
    )


def stand_in() -> Machine:
    """Two ranks on the CPU, for a rehearsal. They are predicted as H100s, of which each has little memory."""
    import torch

    return Machine("cpu", "CPU", 2, GIB // 16, torch.__version__, "none", UNKNOWN, known=True)


def _facts(_place: Any) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(0)
    generation = f"sm_{properties.major}{properties.minor}"
    return {
        "name": f"{properties.name}, {generation}",
        "memory": int(properties.total_memory),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
    }


def _driver() -> str:
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        said = ""
    return next(iter(said.splitlines()), "unknown")

"""The roofline that estimates a step: an operator takes as long as its arithmetic, or as its memory traffic.

On a GPU the host launches kernels ahead of the device, which works through them. So a launch makes no kernel longer:
a stretch between two points at which the host waits for the device takes as long as the device's work, or as the
host's launches, whichever is more. On a CPU both are one, and an operator takes at least as long as its call.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlexp.base.kernel_rates import speed
from rlexp.config.checks.layout import near
from rlexp.config.gpu_descriptions import described, peak_flops
from rlexp.config.schema import Collectives, Config, Device, HardwareConfig, Precision

# Shares of the peak that long kernels reach, on a GPU that has not been measured. Round numbers.
PRODUCTS, ATTENTION, MEMORY, LINKS = 0.7, 0.5, 0.8, 0.75


@dataclass(frozen=True)
class Attending:
    """A call of an attention kernel, as `base/kernel_rates.py` knows their speeds."""

    kernel: str
    head_size: int
    tokens: int
    backward: bool


@dataclass(frozen=True)
class Rates:
    """Rates per second that a kernel reaches, and seconds."""

    products: float
    attention: float  # of a kernel of which no rate was measured
    memory: float
    link: float
    launch: float  # of the host for a kernel, while the device computes
    shortest: float = 0.0  # of an operator, where host and device are one
    peak: float = 0.0  # of products
    generation: int | None = None  # of the GPU

    @staticmethod
    def of(cfg: Config, ring: int) -> Rates:
        hardware = cfg.hardware
        if cfg.launch.device is Device.cpu:
            return dataclasses.replace(OF_A_CORE, link=BETWEEN_PROCESSES if near(cfg, ring) else BETWEEN_MACHINES)
        peak, measured = peak_flops(vars(hardware), cfg.train.precision), measured_rates(hardware)
        products = measured.get("products_tflops") if cfg.train.precision is Precision.bf16 else None
        link = hardware.link_gb_s if near(cfg, ring) else hardware.network_gb_s
        sharing, staged = cfg.launch.ranks_per_gpu, cfg.launch.carrier is Collectives.staged
        peak /= sharing
        return Rates(
            products=products * 1e12 / sharing if products else peak * PRODUCTS,
            attention=peak * ATTENTION,
            memory=1e12 * measured.get("memory_tb_s", hardware.memory_tb_s * MEMORY) / sharing,
            link=THROUGH_THE_HOST if staged else link * 1e9 * LINKS,
            launch=1e-6 * measured.get("launch_us", hardware.launch_us),
            peak=peak,
            generation=hardware.generation,
        )

    def operator(self, flops: int, size: int) -> float:
        """Return the seconds of an operator that computes and moves so much, without its launch."""
        return max(self.shortest, flops / self.products, size / self.memory)

    def attending(self, flops: int, by: Attending | None) -> float:
        """Return the seconds of an attention kernel's arithmetic, by measured rates if there are any."""
        known = speed(by.kernel, self.generation, by.head_size, by.tokens) if by is not None else None
        if by is None or known is None or not known.absolute:
            return flops / self.attention
        return flops / (self.peak * (known.backward if by.backward else known.forward))


# A core of a common machine, and what two ranks exchange through memory or a network. Round numbers.
OF_A_CORE = Rates(products=5e10, attention=5e10, memory=1e10, link=0.0, launch=0.0, shortest=1e-5)
BETWEEN_PROCESSES, BETWEEN_MACHINES = 2e9, 1e9
UNTIMED = Rates(math.inf, math.inf, math.inf, math.inf, launch=0.0, peak=math.inf)  # nothing takes any time
THROUGH_THE_HOST = 1e9  # of each rank, where gloo carries what GPUs exchange. A round number


MEASURED = Path(__file__).with_name("measured.json")  # by `python -m bench.gpu --only rates --keep-rates`
OF_SHEET = {"products_tflops": "bf16_tflops", "memory_tb_s": "memory_tb_s", "launch_us": "launch_us"}


@functools.cache
def _measured() -> dict[str, dict[str, Any]]:
    rates: dict[str, dict[str, Any]] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return rates


def measured_rates(hardware: HardwareConfig) -> dict[str, float]:
    """Return what was measured on this hardware, without what the user has set to another value than its data sheet."""
    sheet, rates = described(hardware.name), _measured().get(hardware.name, {})
    return {key: rates[key] for key, of in OF_SHEET.items() if key in rates and getattr(hardware, of) == sheet.get(of)}


@dataclass
class DeviceClock:
    """The time of a device and of its link, which works beside it."""

    rates: Rates = UNTIMED
    now: float = 0.0
    link_free: float = 0.0

    def operator(self, flops: int, size: int) -> float:
        return self._spend(self.rates.operator(flops, size))

    def attending(self, flops: int, by: Attending | None = None) -> float:
        return self._spend(self.rates.attending(flops, by))

    def _spend(self, seconds: float) -> float:
        self.now += seconds
        return seconds

    def send(self, size: int, rate: float | None = None) -> float:
        """Put bytes on the link behind those that are on it; return when they have arrived."""
        self.link_free = max(self.link_free, self.now) + size / (rate or self.rates.link)
        return self.link_free

    def wait(self, until: float) -> float:
        """Wait for bytes, and return the seconds."""
        waited = max(0.0, until - self.now)
        self.now += waited
        return waited

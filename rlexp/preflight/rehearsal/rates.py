"""The roofline that estimates a step: an operator takes as long as its arithmetic, or as its memory traffic."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from rlexp.base.kernel_rates import speed
from rlexp.config.checks.layout import near
from rlexp.config.schema import Config, Device, HardwareConfig
from rlexp.config.schema.models import Precision

# Shares of the peak that long kernels reach. Round numbers; docs/measured/gpu.md compares estimates with measurements.
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
    """Rates per second that a kernel reaches; `launch` is the shortest time between two kernels."""

    products: float
    attention: float  # of a kernel of which no rate was measured
    memory: float
    link: float
    launch: float
    peak: float = 0.0  # of products
    generation: int | None = None  # of the GPU

    @staticmethod
    def of(cfg: Config, ring: int) -> Rates:
        hardware = cfg.hardware
        if cfg.launch.device is Device.cpu:
            return dataclasses.replace(OF_A_CORE, link=BETWEEN_PROCESSES if near(cfg, ring) else BETWEEN_MACHINES)
        peak = _peak(hardware, cfg.train.precision)
        link = hardware.link_gb_s if near(cfg, ring) else hardware.network_gb_s
        return Rates(
            products=peak * PRODUCTS,
            attention=peak * ATTENTION,
            memory=hardware.memory_tb_s * 1e12 * MEMORY,
            link=link * 1e9 * LINKS,
            launch=hardware.launch_us * 1e-6,
            peak=peak,
            generation=hardware.generation,
        )

    def operator(self, flops: int, size: int) -> float:
        """Return the seconds of an operator that computes and moves so much."""
        return max(self.launch, flops / self.products, size / self.memory)

    def attending(self, flops: int, by: Attending | None) -> float:
        """Return the seconds of an attention kernel's arithmetic, by measured rates if there are any."""
        known = speed(by.kernel, self.generation, by.head_size, by.tokens) if by is not None else None
        if by is None or known is None or not known.absolute:
            return flops / self.attention
        return flops / (self.peak * (known.backward if by.backward else known.forward))


# A core of a common machine, and what two ranks exchange through memory or a network. Round numbers.
OF_A_CORE = Rates(products=5e10, attention=5e10, memory=1e10, link=0.0, launch=1e-5)
BETWEEN_PROCESSES, BETWEEN_MACHINES = 2e9, 1e9


def _peak(hardware: HardwareConfig, precision: Precision) -> float:
    return (
        1e12
        * {
            Precision.bf16: hardware.bf16_tflops,
            Precision.fp32: hardware.fp32_tflops,
            Precision.fp64: hardware.fp64_tflops,
        }[precision]
    )


@dataclass
class Clock:
    """The time of a device and of its link, which works beside it."""

    rates: Rates | None
    now: float = 0.0
    link_free: float = 0.0
    waited: float = 0.0  # for bytes that were not there yet

    def operator(self, flops: int, size: int) -> float:
        return self._spend(self.rates.operator(flops, size) if self.rates else 0.0)

    def attending(self, flops: int, by: Attending | None = None) -> float:
        return self._spend(self.rates.attending(flops, by) if self.rates else 0.0)

    def _spend(self, seconds: float) -> float:
        self.now += seconds
        return seconds

    def send(self, size: int) -> float:
        """Put bytes on the link behind those that are on it; return when they have arrived."""
        if self.rates is not None:
            self.link_free = max(self.link_free, self.now) + size / self.rates.link
        return self.link_free

    def wait(self, until: float) -> float:
        """Wait for bytes, and return the seconds."""
        waited = max(0.0, until - self.now)
        self.now += waited
        return waited

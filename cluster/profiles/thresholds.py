"""The thresholds of one GPU model. Each names its source."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sourced:
    source: str

    def __post_init__(self) -> None:
        if not self.source.strip():
            raise ValueError("a threshold's source is empty; name the document or project the numbers come from")


@dataclass(frozen=True, kw_only=True, slots=True)
class Nvlink(_Sourced):
    """Links of every GPU; `warn_errors` counted errors on a GPU, or more, are a warning."""

    links: int
    warn_errors: int = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Pcie(_Sourced):
    """The link between a GPU and its host."""

    generation: int
    width: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Fabric(_Sourced):
    """NVSwitch boards need a fabric manager; from Hopper on each GPU also reports whether it has joined the fabric."""

    manager: bool
    registration: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Port(_Sourced):
    """Rate of each compute port in Gb/s."""

    rate_gbps: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Ecc(_Sourced):
    """Uncorrectable SRAM errors over the board's life above which the vendor replaces it."""

    return_above_sram_errors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Clocks(_Sourced):
    """Highest SM clock, and how far below it a GPU may be set."""

    sm_mhz: int
    warn_below_mhz: int
    fail_below_mhz: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Xids(_Sourced):
    """Actions by the error number that the driver logs; a number in no list is monitored."""

    reboot: tuple[int, ...]
    reset: tuple[int, ...]
    monitor: tuple[int, ...]

    def __post_init__(self) -> None:
        _Sourced.__post_init__(self)
        numbers = (*self.reboot, *self.reset, *self.monitor)
        twice = sorted({number for number in numbers if numbers.count(number) > 1})
        if twice:
            raise ValueError(f"xids names {twice[0]} under two actions; keep one")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gemm(_Sourced):
    """bf16 GEMM of a healthy GPU, in TFLOP/s: shown beside the fleet's median, which decides."""

    tflops: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduce(_Sourced):
    """Bus bandwidth of a large all-reduce over the 8 GPUs of a healthy node, in GB/s."""

    gb_per_second: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """One GPU model. `names` are the exact names nvidia-smi prints for the boards it holds for."""

    model: str
    names: tuple[str, ...]
    nvlink: Nvlink
    pcie: Pcie
    fabric: Fabric
    port: Port
    ecc: Ecc
    clocks: Clocks
    xids: Xids
    gemm: Gemm
    all_reduce: AllReduce

    def __post_init__(self) -> None:
        if not self.names:
            raise ValueError(f"the profile {self.model} has no names; give those that nvidia-smi -L prints")

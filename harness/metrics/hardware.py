"""Published peaks and measured ceilings of GPUs, from `experiments/hardware/`. They turn FLOP/s into MFU.

The prediction reads speeds of a GPU type and its links, none of a method or of a trial. At most eight constants of a
type are fitted to measurements: seven of these (`FITTED`), and the layers that wait in the memory of the published
systems. The speed of copies to host memory comes from the bus's specification, that of attention's backward from the
forward's where a file gives that alone.
"""

from __future__ import annotations

import datetime
import itertools
import math
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Annotated

from baselines.paper_cluster import GPUS_PER_NODE
from cluster.files.errors import nearest, one_of
from cluster.files.reader import Text, build, check_keys, read_yaml
from engine.reader import Meta
from engine.settings import Kernel
from harness.base.errors import UsageError

# Figures that may be measured rather than published.
MEASURABLE = ("memory_gib", "gemm_tflops", "kernel_ceilings", "kernel_tiles", "speeds")
Count = Annotated[int, Meta(ge=1, description="a whole number of at least 1")]
Positive = Annotated[float, Meta(gt=0, description="a number above 0")]
HARDWARE_DIR = Path(__file__).parents[2] / "experiments" / "hardware"


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasurementOrigin:
    """When, where and on what a figure of a hardware file was measured."""

    when: Text  # the day, as 2026-11-20
    where: Text  # machine and software
    what: Text  # sizes of the problem

    def __post_init__(self) -> None:
        try:
            datetime.date.fromisoformat(self.when)
        except ValueError:
            raise ValueError(f'when is {self.when}; expected a day such as "2026-11-20"') from None


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """TFLOP/s of one attention kernel by the tokens of a causal tile, which rise."""

    tokens: tuple[Positive, ...]
    forward: tuple[Positive, ...]
    backward: tuple[Positive, ...]  # in the kernel convention: five products
    # The same within a training step, whose products hold the GPU at its power limit; empty: as alone.
    backward_in_step: tuple[Positive, ...] = ()

    def __post_init__(self) -> None:
        counts = {each.name: len(getattr(self, each.name)) for each in fields(self)}
        if not self.backward_in_step:
            del counts["backward_in_step"]
        if len(set(counts.values())) != 1 or not self.tokens:
            raise ValueError(f"it has {counts}; expected as many speeds as tokens, at least one")
        if list(self.tokens) != sorted(set(self.tokens)):
            raise ValueError("tokens do not rise; list each tile once, the shortest first")

    def in_step(self) -> Tiles:
        """Those within a training step."""
        return replace(self, backward=self.backward_in_step or self.backward)

    def tflops(self, tokens: float, *, backward: bool) -> float:
        """Between two measured tiles by the logarithm of their tokens; outside of all, the nearest one's."""
        speeds = self.backward if backward else self.forward
        if tokens <= self.tokens[0]:
            return speeds[0]
        for (least, slower), (most, faster) in itertools.pairwise(zip(self.tokens, speeds, strict=True)):
            if tokens <= most:
                return slower + (faster - slower) * math.log(tokens / least) / math.log(most / least)
        return speeds[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class HardwareSpeeds:
    """Of a GPU type, as the prediction reads them. GiB are per second and GPU, in one direction."""

    gemm_tflops: float  # of a model's matrix products
    attention_forward_tflops: float
    attention_backward_tflops: float  # in the kernel convention: five products
    memory_gib: float  # of elementwise passes, read and written
    inside_gib: float  # to a rank of the node
    across_gib: float  # to another node, with NCCL set up for the site (docs/cluster.md)
    across_default_gib: float  # the same with NCCL's own defaults
    ring_step_seconds: float  # that one more step of a ring adds to a pass: launches, merge, waiting for its message
    float8_tflops: float = 1300.0  # of matrix products in float8
    host_gib: float = 24.0  # to or from pinned host memory, every GPU of a node at once
    tiles: Tiles | None = None  # of the attention kernel, where they were measured; then they stand for its two speeds

    def __post_init__(self) -> None:
        for name in SPEEDS:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number above 0")


_NOT_FITTED = ("host_gib", "attention_backward_tflops", "float8_tflops")
SPEEDS = tuple(each.name for each in fields(HardwareSpeeds) if each.name != "tiles")
FITTED = tuple(name for name in SPEEDS if name not in _NOT_FITTED)  # to measurements

# Where a hardware file gives no speed: shares of its datasheet's peak that kernels of its time reach.
_GEMM_SHARE = 0.75
_FLOAT8_SHARE = 1.3  # of the peak in bf16
_FORWARD_SHARE = 0.65
BACKWARD_OF_FORWARD = 0.92  # attention's: FlashAttention's own tables of an A100 and an H100, long causal sequences
_COMMON = {"memory_gib": 1000.0, "inside_gib": 150.0, "across_gib": 10.0, "ring_step_seconds": 2e-3, "host_gib": 24.0}


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One GPU model. TFLOP/s are 1e12 floating point operations per second of dense (not sparse) bf16."""

    name: str  # the file's stem
    title: Text
    gpu_names: tuple[Text, ...]  # as nvidia-smi prints them
    peak_bf16_tflops: Positive  # by datasheet
    memory_gib: Positive  # usable by programs
    gemm_tflops: Positive | None = None  # measured on a large GEMM; None when not measured
    # Attention kernel -> {"forward": TFLOP/s, "backward": TFLOP/s}
    kernel_ceilings: dict[str, dict[str, Positive]] = field(default_factory=dict)
    sources: dict[str, Text]  # where each figure comes from
    measured: dict[str, MeasurementOrigin] = field(default_factory=dict)  # by figure, if more than its source is known
    speeds: dict[str, Positive] = field(default_factory=dict)  # constants of the prediction that the file gives
    spread: dict[str, Positive] = field(default_factory=dict)  # of those measured: (largest - least) / median
    gpus_per_node: Count = GPUS_PER_NODE
    kernel_tiles: dict[str, Tiles] = field(default_factory=dict)  # attention kernel -> its speeds by tile
    # Layers whose gathered parameters and gradients wait for their stream in the published systems; fitted to their
    # memory (docs/plan.md). None: not known of this GPU type.
    waiting_layers: Positive | None = None
    compute_capability: Positive | None = None  # as NVIDIA writes it, 9.0 for Hopper; None: not known
    figures: dict[str, Text] = field(default_factory=dict)  # all that `burst setup calibrate` measured, as it wrote it

    def source_of(self, figure: str) -> str:
        """When and on what a measured figure was measured, in a few words: file, day and sizes."""
        found = self.measured.get(figure)
        detail = (found.when, found.what) if found else (self.sources[figure],)
        return ", ".join((f"experiments/hardware/{self.name}.yaml", *detail))


def hardware_for(gpu_name: str) -> Hardware | None:
    """Hardware of a GPU by the name nvidia-smi prints, or None when no file lists that name.

    Names must match exactly: an H100 PCIe is not the H100 SXM, and a guessed peak would be a wrong MFU.
    """
    wanted = gpu_name.casefold().strip()
    return next((hw for hw in all_hardware().values() if wanted in map(str.casefold, hw.gpu_names)), None)


def hardware_named(name: str) -> Hardware:
    """Hardware by its file's stem, in any case, or by a path that ends in .yaml, as `burst setup calibrate` writes one.

    Raises UsageError with the names there are.
    """
    if name.endswith((".yaml", ".yml")):
        return load_hardware(Path(name))
    known = all_hardware()
    stem = name.casefold()
    if stem not in known:
        raise UsageError(
            f"hardware {name!r} has no file in experiments/hardware/; {nearest(stem, known)}"
            if name
            else f"--hardware names nothing; expected {one_of(known)}"
        )
    return known[stem]


def hardware_names() -> list[str]:
    """Names of all known GPU models."""
    return sorted(path.stem for path in HARDWARE_DIR.glob("*.yaml"))


@cache
def all_hardware() -> dict[str, Hardware]:
    """Every known GPU model by file stem. Raises UsageError when a file is not as `docs/plan.md` says."""
    return {name: load_hardware(HARDWARE_DIR / f"{name}.yaml") for name in hardware_names()}


def load_hardware(path: Path) -> Hardware:
    """Read one hardware file strictly. Raises UsageError naming the file, the line and what is wrong."""
    root = read_yaml(path, "hardware file")
    hardware = build(Hardware, root, name=path.stem)
    entries = root.mapping("the hardware file")
    figures = [key for key in ("peak_bf16_tflops", "waiting_layers", *MEASURABLE) if key in entries]
    kernels = typing.get_args(Kernel)
    for key, known in {
        "sources": figures, "measured": [key for key in MEASURABLE if key in entries], "kernel_ceilings": kernels,
        "kernel_tiles": kernels, "speeds": SPEEDS, "spread": SPEEDS,
    }.items():  # fmt: skip
        if key in entries:
            check_keys(entries[key].mapping(key), known, key)
    if unsourced := sorted(set(figures) - hardware.sources.keys()):
        raise UsageError(f"{entries['sources'].place}: sources lacks {', '.join(unsourced)}; say where they come from")
    for kernel, given in hardware.kernel_ceilings.items():
        place = root.place_of(("kernel_ceilings", kernel))
        hardware.kernel_ceilings[kernel] = _both_passes(given, f"{place}: kernel_ceilings.{kernel}")
    return hardware


def _both_passes(given: dict[str, float], label: str) -> dict[str, float]:
    """Speeds of an attention kernel. Where only forward and backward together were measured, as `forward_backward`,
    both passes take that speed: their total time comes out as measured."""
    if given.keys() == {"forward_backward"}:
        return dict.fromkeys(("forward", "backward"), given["forward_backward"])
    if given.keys() != {"forward", "backward"}:
        raise UsageError(
            f"{label} gives {', '.join(given) or 'nothing'}; expected forward and backward, or forward_backward alone"
        )
    return given


def speeds_of(hardware: Hardware, kernel: str | None = None) -> HardwareSpeeds:
    """The constants of a hardware file; those of attention are the named kernel's where the file has them measured, by
    tile where it has that.

    A figure that the file lacks follows from its peak; `assumed` names them.
    """
    given: dict[str, float] = dict(hardware.speeds)
    peak = hardware.peak_bf16_tflops
    given.setdefault("gemm_tflops", hardware.gemm_tflops or _GEMM_SHARE * peak)
    given.setdefault("float8_tflops", _FLOAT8_SHARE * peak)
    ceilings = hardware.kernel_ceilings
    chosen: Mapping[str, float] = ceilings.get(kernel or "", {})
    if not chosen and "attention_forward_tflops" not in given and ceilings:
        kernel = next(iter(ceilings))
        chosen = ceilings[kernel]
    given |= {f"attention_{direction}_tflops": tflops for direction, tflops in chosen.items()}
    forward = given.setdefault("attention_forward_tflops", _FORWARD_SHARE * peak)
    given.setdefault("attention_backward_tflops", BACKWARD_OF_FORWARD * forward)
    for name, value in _COMMON.items():
        given.setdefault(name, value)
    given.setdefault("across_default_gib", given["across_gib"])
    return HardwareSpeeds(**given, tiles=hardware.kernel_tiles.get(kernel or "") if chosen else None)


def assumed(hardware: Hardware) -> tuple[str, ...]:
    """Constants that no file gives, for which a common value stands; not of float8, which few trials use."""
    known = {"float8_tflops", *hardware.speeds} | ({"gemm_tflops"} if hardware.gemm_tflops else set())
    if hardware.kernel_ceilings or "attention_forward_tflops" in known:
        known |= {"attention_forward_tflops", "attention_backward_tflops"}
    return tuple(name for name in SPEEDS if name not in known)

"""Published peaks and measured ceilings of GPUs, from `experiments/hardware/`. They turn FLOP/s into MFU."""

from __future__ import annotations

import datetime
import itertools
import math
import typing
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path

from baselines.paper_cluster import GPUS_PER_NODE
from cluster.files.errors import nearest, one_of
from cluster.files.reader import Node, build, check_keys, convert, read_yaml
from engine.settings import Kernel
from harness.base.errors import UsageError

# Figures that may be measured rather than published.
MEASURABLE = ("memory_gib", "gemm_tflops", "kernel_ceilings", "kernel_tiles", "speeds")
HARDWARE_DIR = Path(__file__).parents[2] / "experiments" / "hardware"


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """When, where and on what a figure of a hardware file was measured."""

    when: str  # the day, as 2026-11-20
    where: str  # machine and software
    what: str  # sizes of the problem


@dataclass(frozen=True, kw_only=True, slots=True)
class Tiles:
    """TFLOP/s of one attention kernel by the tokens of a causal tile, which rise."""

    tokens: tuple[float, ...]
    forward: tuple[float, ...]
    backward: tuple[float, ...]  # in the kernel convention: five products

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
class Speeds:
    """Of a GPU type, as the prediction reads them. GiB are per second and GPU, in one direction."""

    gemm_tflops: float  # of a model's matrix products
    attention_forward_tflops: float
    attention_backward_tflops: float  # in the kernel convention: five products
    memory_gib: float  # of elementwise passes, read and written
    inside_gib: float  # to a rank of the node
    across_gib: float  # to another node, with NCCL set up for the site (docs/cluster.md)
    across_default_gib: float  # the same with NCCL's own defaults
    ring_step_seconds: float  # that one more step of a ring adds to a pass: launches, merge, waiting for its message
    host_gib: float = 24.0  # to or from pinned host memory, every GPU of a node at once
    tiles: Tiles | None = None  # of the attention kernel, where they were measured; then they stand for its two speeds

    def __post_init__(self) -> None:
        for name in SPEEDS:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} is {getattr(self, name)}; expected a number above 0")


SPEEDS = tuple(each.name for each in fields(Speeds) if each.name != "tiles")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """One GPU model. TFLOP/s are 1e12 floating point operations per second of dense (not sparse) bf16."""

    name: str  # the file's stem
    title: str
    gpu_names: tuple[str, ...]  # as nvidia-smi prints them
    peak_bf16_tflops: float  # by datasheet
    memory_gib: float  # usable by programs
    gemm_tflops: float | None  # measured on a large GEMM; None when not measured
    kernel_ceilings: dict[str, dict[str, float]]  # attention kernel -> {"forward": TFLOP/s, "backward": TFLOP/s}
    sources: dict[str, str]  # where each figure comes from
    measured: dict[str, Measured] = field(default_factory=dict)  # by figure, where its file says more than the source
    speeds: dict[str, float] = field(default_factory=dict)  # constants of the prediction that the file gives
    spread: dict[str, float] = field(default_factory=dict)  # of those measured: (largest - least) / median
    gpus_per_node: int = GPUS_PER_NODE
    kernel_tiles: dict[str, Tiles] = field(default_factory=dict)  # attention kernel -> its speeds by tile
    # Layers whose gathered parameters and gradients wait for their stream in the published systems; fitted to their
    # memory (docs/plan.md). None: not known of this GPU type.
    waiting_layers: float | None = None
    figures: dict[str, str] = field(default_factory=dict)  # everything `burst calibrate` measured, as it wrote it

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
    """Hardware by its file's stem, in any case, or by a path that ends in .yaml, as `burst calibrate` writes one.

    Raises UsageError with the names there are.
    """
    if name.endswith((".yaml", ".yml")):
        return load_hardware(Path(name))
    known = all_hardware()
    name = name.casefold()
    if name not in known:
        raise UsageError(
            f"hardware {name!r} has no file in experiments/hardware/; {nearest(name, known)}"
            if name
            else f"--hardware names nothing; expected {one_of(known)}"
        )
    return known[name]


@cache
def all_hardware() -> dict[str, Hardware]:
    """Every known GPU model by file stem. Raises UsageError when a file is not as `docs/plan.md` says."""
    return {path.stem: load_hardware(path) for path in sorted(HARDWARE_DIR.glob("*.yaml"))}


def load_hardware(path: Path) -> Hardware:
    """Read one hardware file strictly. Raises UsageError naming the file, the line and what is wrong."""
    root = read_yaml(path, "hardware file")
    entries = root.mapping("the hardware file")
    known = [each.name for each in fields(Hardware) if each.name != "name"]
    check_keys(entries, known, "the hardware file")
    optional = (
        "gemm_tflops", "kernel_ceilings", "kernel_tiles", "measured", "speeds", "spread", "gpus_per_node", "figures",
        "waiting_layers",
    )  # fmt: skip
    missing = [key for key in known if key not in entries and key not in optional]
    if missing:
        raise UsageError(f"{path}: the hardware file lacks {', '.join(missing)}; add what is missing")

    gemm = entries.get("gemm_tflops")
    ceilings = _ceilings(entries["kernel_ceilings"]) if "kernel_ceilings" in entries else {}
    hardware = Hardware(
        name=path.stem,
        title=convert(entries["title"], str, "title"),
        gpu_names=tuple(convert(node, str, "gpu_names") for node in entries["gpu_names"].items()),
        peak_bf16_tflops=_positive(entries["peak_bf16_tflops"], "peak_bf16_tflops"),
        memory_gib=_positive(entries["memory_gib"], "memory_gib"),
        gemm_tflops=None if gemm is None else _positive(gemm, "gemm_tflops"),
        kernel_ceilings=ceilings,
        sources={key: convert(node, str, key) for key, node in entries["sources"].mapping("sources").items()},
        measured=_measured(entries["measured"], entries) if "measured" in entries else {},
        speeds=_numbers(entries["speeds"], "speeds") if "speeds" in entries else {},
        spread=_numbers(entries["spread"], "spread") if "spread" in entries else {},
        figures={
            key: convert(node, str, f"figures.{key}")
            for key, node in (entries["figures"].mapping("figures") if "figures" in entries else {}).items()
        },
        gpus_per_node=(
            convert(entries["gpus_per_node"], int, "gpus_per_node") if "gpus_per_node" in entries else GPUS_PER_NODE
        ),
        kernel_tiles=_tiles(entries["kernel_tiles"]) if "kernel_tiles" in entries else {},
        waiting_layers=(
            _positive(entries["waiting_layers"], "waiting_layers") if "waiting_layers" in entries else None
        ),
    )
    figures = {key for key in ("peak_bf16_tflops", "waiting_layers", *MEASURABLE) if key in entries}
    check_keys(entries["sources"].mapping("sources"), figures, "sources")
    if unsourced := sorted(figures - hardware.sources.keys()):
        raise UsageError(f"{entries['sources'].place}: sources lacks {', '.join(unsourced)}; say where they come from")
    return hardware


def _ceilings(node: Node) -> dict[str, dict[str, float]]:
    """Speeds per attention kernel. Where only forward and backward together were measured, as `forward_backward`,
    both passes take that speed: their total time comes out as measured."""
    kernels = node.mapping("kernel_ceilings")
    check_keys(kernels, typing.get_args(Kernel), "kernel_ceilings")
    ceilings = {}
    for kernel, entry in kernels.items():
        speeds = entry.mapping(f"kernel_ceilings.{kernel}")
        check_keys(speeds, ("forward", "backward", "forward_backward"), f"kernel_ceilings.{kernel}")
        given = {key: _positive(value, key) for key, value in speeds.items()}
        if given.keys() == {"forward_backward"}:
            given = dict.fromkeys(("forward", "backward"), given["forward_backward"])
        if given.keys() != {"forward", "backward"}:
            raise UsageError(
                f"{entry.place}: kernel_ceilings.{kernel} gives {', '.join(given) or 'nothing'}; "
                "expected forward and backward, or forward_backward alone"
            )
        ceilings[kernel] = given
    return ceilings


def _tiles(node: Node) -> dict[str, Tiles]:
    """Speeds per attention kernel by the tokens of a tile."""
    kernels = node.mapping("kernel_tiles")
    check_keys(kernels, typing.get_args(Kernel), "kernel_tiles")
    found = {}
    for kernel, entry in kernels.items():
        label = f"kernel_tiles.{kernel}"
        given = entry.mapping(label)
        names = [each.name for each in fields(Tiles)]
        check_keys(given, names, label)
        if missing := [name for name in names if name not in given]:
            raise UsageError(f"{entry.place}: {label} lacks {', '.join(missing)}; add what is missing")
        columns = {name: tuple(_positive(each, f"{label}.{name}") for each in given[name].items()) for name in names}
        counts = {name: len(column) for name, column in columns.items()}
        if len(set(counts.values())) != 1 or not columns["tokens"]:
            raise UsageError(f"{entry.place}: {label} has {counts}; expected as many speeds as tokens, at least one")
        if list(columns["tokens"]) != sorted(set(columns["tokens"])):
            raise UsageError(f"{entry.place}: {label}.tokens do not rise; list each tile once, the shortest first")
        found[kernel] = Tiles(**columns)
    return found


def _numbers(node: Node, label: str) -> dict[str, float]:
    """Positive numbers by the names of the prediction's constants."""
    entries = node.mapping(label)
    check_keys(entries, SPEEDS, label)
    return {key: _positive(value, f"{label}.{key}") for key, value in entries.items()}


def _measured(node: Node, given: dict[str, Node]) -> dict[str, Measured]:
    """When, where and on what the figures of a file were measured, of those that it gives."""
    figures = node.mapping("measured")
    check_keys(figures, [key for key in MEASURABLE if key in given], "measured")
    found = {key: build(Measured, entry, f"measured.{key}") for key, entry in figures.items()}
    for key, each in found.items():
        try:
            datetime.date.fromisoformat(each.when)
        except ValueError:
            raise UsageError(
                f'{figures[key].place}: measured.{key}.when is {each.when}; expected a day such as "2026-11-20"'
            ) from None
    return found


def _positive(node: Node, label: str) -> float:
    value = convert(node, float, label)
    if value <= 0:
        raise UsageError(f"{node.place}: {label} is {value:g}; expected a number above 0")
    return float(value)

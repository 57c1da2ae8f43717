"""`burst setup calibrate`: this machine's speeds measured by its own ranks, and the hardware file that they make."""

from __future__ import annotations

import datetime
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from engine.atomic import write_atomic
from engine.measurement import LINK
from engine.reader import to_json
from engine.shape import ModelShape
from harness.base.errors import UsageError
from harness.metrics.hardware import hardware_for
from harness.records.stored import read_records, stored_run

_MODULE = "engine.tasks.calibrate"
_GPU_REQUEST = {
    "tokens": 16384, "heads": 32, "head_dim": 128, "tiles": [2048, 4096, 8192, 16384, 32768, 65536],
    "memory_bytes": 4 << 30, "message_bytes": [1 << 16, 1 << 20, 1 << 24, 1 << 28],
}  # fmt: skip
_CPU_REQUEST = {
    "tokens": 256, "heads": 2, "head_dim": 16, "tiles": [128, 256], "memory_bytes": 1 << 24,
    "message_bytes": [1 << 16, 1 << 20],
}  # fmt: skip
_LOG_LINES = 3
_MODEL_GEMM = r"gemm \S+"  # the figure over all products of a model; a figure of one product has its name at the end
_ACROSS = "link across"
_MEASURED = ("gemm_tflops", "kernel_ceilings", "kernel_tiles", "speeds")


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured speed, over ranks and repeats."""

    median: float
    least: float
    largest: float
    samples: int
    unit: str
    what: str

    @property
    def spread(self) -> float:
        return (self.largest - self.least) / self.median


@dataclass(frozen=True, kw_only=True, slots=True)
class Calibrated:
    """What the ranks of one host measured."""

    device: str  # as nvidia-smi prints it; "cpu"
    ranks: int
    torch: str
    figures: Mapping[str, Figure]


def measure(ranks: int, device: str, models: Sequence[ModelShape], *, timeout_seconds: float) -> Calibrated:
    """Start `ranks` processes on this host and measure. Raises UsageError when one fails or the time is over."""
    request = dict(_GPU_REQUEST if device == "cuda" else _CPU_REQUEST) | {"models": [to_json(each) for each in models]}
    with tempfile.TemporaryDirectory(prefix="burst-calibrate-") as folder:
        place = Path(folder)
        asked = write_atomic(place / "request.json", json.dumps(request))
        processes = [_start(place, rank, ranks, [str(asked), str(place / "figures.json")]) for rank in range(ranks)]
        _wait(processes, place, timeout_seconds)
        found = json.loads((place / "figures.json").read_text(encoding="utf-8"))
    about = found.pop("device")
    return Calibrated(
        device=about["name"], ranks=about["ranks"], torch=about["torch"],
        figures={name: Figure(**values) for name, values in found.items()},
    )  # fmt: skip


def links_across(run: Path) -> dict[str, Figure]:
    """The link between nodes, as the trials of a run over several nodes measured it around their steps: GiB/s, and
    microseconds of a small message where the trials have them. Raises UsageError where no trial measured the link, and
    for bad records."""
    if not run.exists():
        raise UsageError(f"--across {run}: found nothing there; give a run over several nodes")
    speeds: list[float] = []
    latencies: list[float] = []
    for record in read_records(run):
        extra = record.measurement.extra if record.status == "ok" and record.measurement else {}
        last = extra.get("across_gib_per_second")
        speeds += extra.get(LINK, {"after": last} if last else {}).values()
        latencies += [1e6 * extra["link_latency_seconds"]] if "link_latency_seconds" in extra else []
    if not speeds:
        raise UsageError(
            f"--across {run}: no trial there measured a link between nodes; give a run over several nodes "
            "(docs/cluster.md)"
        )
    what = f"messages to the next node while all ranks send, by the trials of {stored_run(run).name}"
    found = {_ACROSS: _figure(speeds, "GiB/s", what)}
    return found | ({"latency across": _figure(latencies, "us", what)} if latencies else {})


def _figure(values: Sequence[float], unit: str, what: str) -> Figure:
    return Figure(
        median=statistics.median(values), least=min(values), largest=max(values), samples=len(values), unit=unit,
        what=what,
    )  # fmt: skip


def _start(place: Path, rank: int, ranks: int, words: Sequence[str]) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks),
        "BURST_STORE": str(place / "store"),
    }  # fmt: skip
    with (place / f"rank{rank}.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-m", _MODULE, *words], env=environment, stdout=log, stderr=subprocess.STDOUT,
            cwd=Path(__file__).parents[2], start_new_session=True,
        )  # fmt: skip


def _wait(processes: Sequence[subprocess.Popen[bytes]], place: Path, timeout_seconds: float) -> None:
    """Until all have ended well. Ends the others when one fails."""
    end = time.monotonic() + timeout_seconds
    try:
        running = True
        while running:
            running = any(each.poll() is None for each in processes)  # before the look at exit codes, which may be new
            if failed := [rank for rank, each in enumerate(processes) if each.poll()]:
                raise UsageError(f"rank {failed[0]} of the calibration failed: {_last_words(place, failed[0])}")
            if running and time.monotonic() > end:
                raise UsageError(
                    f"the calibration was not finished after {timeout_seconds:g} s; give --timeout a larger number"
                )
            time.sleep(0.1)
    finally:
        for each in processes:
            if each.poll() is None:
                each.kill()
            each.wait()


def _last_words(place: Path, rank: int) -> str:
    lines = (place / f"rank{rank}.log").read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip()]
    return "; ".join(said[-_LOG_LINES:]) or "no output"


def constants(found: Calibrated) -> tuple[dict[str, float], dict[str, float]]:
    """(speeds, spread) of the prediction's constants that these figures give."""
    taken = {
        "gemm_tflops": _slowest(found, _MODEL_GEMM),
        "memory_gib": found.figures.get("memory"),
        "host_gib": found.figures.get("host"),
        "inside_gib": _last(found, r"link inside (\d+)"),
        "across_gib": found.figures.get(_ACROSS),
    }
    kernels = [by_way for by_way in _attention(found).values() if "forward" in by_way]
    fastest = max(kernels, key=lambda by_way: _longest(by_way["forward"]).median, default={})
    taken |= {f"attention_{way}_tflops": _longest(tiles) for way, tiles in fastest.items()}
    speeds = {name: figure.median for name, figure in taken.items() if figure is not None}
    return speeds, {name: figure.spread for name, figure in taken.items() if figure is not None and figure.spread > 0}


def _attention(found: Calibrated) -> dict[str, dict[str, dict[int, Figure]]]:
    """Figures of attention by kernel, by `forward` and `backward`, and by tokens of the tile, the shortest first."""
    figures: dict[str, dict[str, dict[int, Figure]]] = {}
    for name, figure in found.figures.items():
        if match := re.fullmatch(r"attention (\S+) (forward|backward) (\d+)", name):
            figures.setdefault(match[1], {}).setdefault(match[2], {})[int(match[3])] = figure
    return {
        kernel: {way: dict(sorted(tiles.items())) for way, tiles in by_way.items()}
        for kernel, by_way in figures.items()
    }


def _longest(tiles: Mapping[int, Figure]) -> Figure:
    return tiles[max(tiles)]


def _tiles(forward: Mapping[int, Figure], backward: Mapping[int, Figure]) -> dict[str, list[float]]:
    """Speeds of one kernel by tile, as a hardware file has them: of the tiles that were measured both ways."""
    tokens = [each for each in forward if each in backward]
    return {
        "tokens": [*tokens],
        "forward": [_rounded(forward[each].median) for each in tokens],
        "backward": [_rounded(backward[each].median) for each in tokens],
    }


def _conditions(found: Calibrated, pattern: str) -> str:
    """What the figures of such names were measured on, each said once."""
    return "; ".join(dict.fromkeys(each.what for name, each in found.figures.items() if re.fullmatch(pattern, name)))


def _slowest(found: Calibrated, pattern: str) -> Figure | None:
    fitting = [figure for name, figure in found.figures.items() if re.fullmatch(pattern, name)]
    return min(fitting, key=lambda figure: figure.median, default=None)


def _last(found: Calibrated, pattern: str) -> Figure | None:
    """The figure of the largest size."""
    sizes = {int(match[1]): figure for name, figure in found.figures.items() if (match := re.fullmatch(pattern, name))}
    return sizes[max(sizes)] if sizes else None


def hardware_document(found: Calibrated, *, memory_gib: float, gpus_per_node: int) -> dict[str, object]:
    """The hardware file, as `load_hardware` reads it. What was not measured comes from this GPU's shipped file."""
    shipped = hardware_for(found.device)
    speeds, spread = constants(found)
    of_shipped = {name: value for name, value in shipped.speeds.items() if name not in speeds} if shipped else {}
    day = datetime.datetime.now(datetime.UTC).date().isoformat()
    where = f"{found.ranks} x {found.device}, torch {found.torch}"
    attention = _attention(found)
    ceilings = {
        kernel: {way: _rounded(_longest(tiles).median) for way, tiles in by_way.items()}
        for kernel, by_way in attention.items()
    }
    tiles = {
        kernel: _tiles(by_way["forward"], by_way["backward"])
        for kernel, by_way in attention.items()
        if by_way.get("forward", {}).keys() & by_way.get("backward", {}).keys()
    }
    tile = r"attention \S+ \S+ "
    longest = max((each["tokens"][-1] for each in tiles.values()), default=0)
    of = {
        "gemm_tflops": _conditions(found, _MODEL_GEMM),
        "kernel_ceilings": _conditions(found, f"{tile}{longest}"),
        "kernel_tiles": _conditions(found, f"{tile}.*"),
        "speeds": _conditions(found, f"{_MODEL_GEMM}|{tile}{longest}|memory|host|link .*"),
    }
    document: dict[str, Any] = {
        "title": f"{shipped.title if shipped else found.device}, measured",
        "gpu_names": [found.device],
        "peak_bf16_tflops": shipped.peak_bf16_tflops if shipped else _rounded(speeds["gemm_tflops"] / 0.75),
        "memory_gib": _rounded(memory_gib),
        "gpus_per_node": gpus_per_node,
        "gemm_tflops": _rounded(speeds["gemm_tflops"]),
        "kernel_ceilings": ceilings,
        "kernel_tiles": tiles,
        "speeds": {name: _rounded(value) for name, value in (speeds | of_shipped).items()},
        "spread": {name: _rounded(value) for name, value in spread.items()},
        "measured": {
            key: {"when": day, "where": where, "what": of[key]} for key in _MEASURED
        },
        "sources": {
            "peak_bf16_tflops": shipped.sources["peak_bf16_tflops"] if shipped
            else "not a datasheet's: the measured GEMM over 0.75; put the datasheet's figure here",
            "memory_gib": "what this machine has",
            **dict.fromkeys(_MEASURED, f"measured {day} by burst setup calibrate"),
        },
    }  # fmt: skip
    if shipped and of_shipped:
        document["sources"]["speeds"] += (
            f"; {', '.join(of_shipped)} were not measured here and are those of experiments/hardware/"
            f"{shipped.name}.yaml: {shipped.sources['speeds']}"
        )
    if not ceilings:
        for part in (document, document["measured"], document["sources"]):
            part.pop("kernel_ceilings")
            part.pop("kernel_tiles")
    document["figures"] = {
        name: f"{_rounded(each.median):g} {each.unit} ({_rounded(each.least):g} to {_rounded(each.largest):g}, "
        f"{each.samples} samples): {each.what}"
        for name, each in found.figures.items()
    }
    return document


def write_hardware_file(path: Path, document: Mapping[str, object]) -> Path:
    """Write it whole. Raises UsageError where a file is there already: nothing is overwritten."""
    if path.exists():
        raise UsageError(f"{path} exists; give --out another name, or move that file away")
    head = "# Measured by burst setup calibrate; docs/plan.md says what each speed is.\n"
    return write_atomic(path, head + yaml.safe_dump(dict(document), sort_keys=False, allow_unicode=True, width=120))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")

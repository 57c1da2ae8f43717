"""Measurements of active tests: their sizes, their results, and the marked line of JSON that a worker prints."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

MARK = "burst-active "


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSpeeds:
    """Speeds of one node by itself. TFLOP/s and GB/s (1e9 bytes); lists are by device."""

    gpu: str
    gemm_tflops: list[float]
    hbm_gb_per_second: list[float]  # bytes read and written by a copy within the device
    to_device_gb_per_second: list[float]  # from pinned host memory
    from_device_gb_per_second: list[float]
    peer_gb_per_second: dict[str, float] = field(default_factory=dict)  # "0-1": from device 0 to device 1
    all_reduce_gb_per_second: float | None = None  # bus bandwidth over all devices; None with fewer than two


@dataclass(frozen=True, kw_only=True, slots=True)
class Unavailable:
    """The reason why a node cannot run active tests."""

    reason: str


def line(kind: str, content: Mapping[str, Any]) -> str:
    """One line for stdout."""
    return MARK + json.dumps({"kind": kind, **content}, allow_nan=False)


def speeds_line(speeds: NodeSpeeds) -> str:
    return line("speeds", asdict(speeds))


def found(text: str, kind: str) -> dict[str, Any] | None:
    """The last line of this kind, without its kind; None when there is none."""
    for printed in reversed(text.splitlines()):
        if printed.startswith(MARK):
            try:
                content = json.loads(printed.removeprefix(MARK))
            except ValueError:
                continue
            if isinstance(content, dict) and content.pop("kind", None) == kind:
                return content
    return None


def read_speeds(text: str) -> NodeSpeeds | Unavailable | None:
    """The answer of a worker; None when it printed no marked line."""
    unavailable = found(text, "unavailable")
    if unavailable:
        return Unavailable(reason=str(unavailable.get("reason")))
    content = found(text, "speeds")
    if content is None:
        return None
    try:
        return NodeSpeeds(**content)
    except TypeError:
        return Unavailable(reason="the node runs another version of this project; update it")


Device = Literal["cuda", "cpu"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Sizes in elements and bytes; each measured number is the median of `blocks` timings of `repeats` calls."""

    gemm: int  # rows, columns and inner dimension
    copy_bytes: int
    peer_bytes: int
    all_reduce_bytes: int  # at least 1 GiB on GPUs: smaller ones measure latency
    pair_bytes: int
    blocks: int
    repeats: int


SIZES: dict[Device, Sizes] = {
    "cuda": Sizes(
        gemm=8192,
        copy_bytes=2 * 2**30,
        peer_bytes=2**28,
        all_reduce_bytes=2**30,
        pair_bytes=2**28,
        blocks=5,
        repeats=20,
    ),
    "cpu": Sizes(
        gemm=64, copy_bytes=2**20, peer_bytes=2**20, all_reduce_bytes=2**16, pair_bytes=2**16, blocks=3, repeats=2
    ),
}

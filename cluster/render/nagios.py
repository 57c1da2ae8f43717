"""Reports as one line of a Nagios plugin: status, words, and performance data behind the bar.

Source: Nagios plugin development guidelines, "Plugin Output" and "Performance data".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from cluster.health.nodes import NodeReport
from cluster.probing.verdict import LEVELS, Level, worst_level
from cluster.render.table import headline

_WORDS: dict[Level, str] = {"ok": "OK", "warn": "WARNING", "fail": "CRITICAL", "unknown": "UNKNOWN"}
_NODES_NAMED = 3  # a pager shows little more


def nagios_line(reports: Sequence[NodeReport]) -> str:
    """`NODES CRITICAL - 3 of 4 usable; gpu02: gpus: 7 x NVIDIA H200, ... | usable=3;;;0;4 ok=3 ...`."""
    usable = sum(report.usable for report in reports)
    bad = sorted((report for report in reports if report.level != "ok"), key=lambda one: -LEVELS.index(one.level))
    words = [f"{usable} of {len(reports)} usable"]
    words += [f"{report.host.name}: {headline(report)}" for report in bad[:_NODES_NAMED]]
    if len(bad) > _NODES_NAMED:
        words.append(f"and {len(bad) - _NODES_NAMED} more nodes")
    text = "; ".join(words).replace("|", "/")  # a bar begins the performance data
    levels = Counter(report.level for report in reports)
    data = [f"usable={usable};;;0;{len(reports)}"]
    data += [f"{level}={levels[level]};;;0;{len(reports)}" for level in LEVELS]
    data.append(f"busy={sum(report.busy for report in reports)};;;0;{len(reports)}")
    data.append(f"seconds={max((report.seconds for report in reports), default=0.0):.3f}s;;;0")
    return f"NODES {_WORDS[worst_level(report.level for report in reports)]} - {text} | {' '.join(data)}"

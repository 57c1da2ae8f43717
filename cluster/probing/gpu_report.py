"""`nvidia-smi -q`: everything the driver reports about each GPU, read once for all checks that judge it.

Old and new drivers share this text form: a field that a driver lacks is absent or `N/A`, while one unknown field makes
a whole `--query-gpu` fail.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cluster.files.errors import counted
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict, merge

# Top-level entries of a GPU that some check reads; the rest of some 300 lines per GPU stays on the node.
_SECTIONS = (
    "Product Name|Persistence Mode|VBIOS Version|GPU Recovery Action|ECC |Remapped Rows|Temperature|GPU Power Readings|"
    "Power Readings|Clocks Event Reasons|Clocks Throttle Reasons|Max Clocks|Applications Clocks|"
    "Default Applications Clocks|Fabric"
)
PROBE = Probe(
    script=f"""{nvidia_smi.REQUIRE}
report=$(nvidia-smi -q) || {{ status=$?; printf '%s\\n' "$report" | head -n 50; exit "$status"; }}
printf '%s\\n' "$report" | awk '/^[^ ]/ {{ print; next }} /^    [^ ]/ {{ keep = $0 ~ /^    ({_SECTIONS})/ }} keep' |
    sed 's/  *: /: /'
""",
    seconds=nvidia_smi.SECONDS,
)
_GPU = re.compile(r"GPU ([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f]+\.[0-9A-Fa-f]+)")
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuReport:
    """One GPU's entries, by their path: `ECC Errors/Volatile/DRAM Uncorrectable`."""

    index: int
    bus_id: str
    entries: Mapping[str, str]

    def text(self, *paths: str) -> str | None:
        """The first of these entries that has a value."""
        for path in paths:
            value = self.entries.get(path, "")
            if value and value not in ("N/A", "[N/A]", "Unknown Error", "Requested functionality has been deprecated"):
                return value
        return None

    def number(self, *paths: str) -> float | None:
        """The first of these entries that begins with a number, without its unit."""
        for path in paths:
            match = _NUMBER.match(self.entries.get(path, ""))
            if match:
                return float(match[0])
        return None

    def below(self, path: str) -> dict[str, str]:
        """The entries under a path, by the rest of theirs."""
        return {
            name.removeprefix(f"{path}/"): value for name, value in self.entries.items() if name.startswith(f"{path}/")
        }


@functools.lru_cache(maxsize=64)  # eight checks read the same report, and nodes are judged side by side
def parse(text: str) -> tuple[Mapping[str, str], tuple[GpuReport, ...]]:
    """The report's entries for the node (`Driver Version`, `CUDA Version`), and for each GPU in order."""
    node: dict[str, str] = {}
    gpus: list[tuple[str, dict[str, str]]] = []
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        content = line.strip()
        indent = len(line) - len(line.lstrip())
        if match := _GPU.match(line):
            gpus.append((match[1], {}))
            parents = []
            continue
        key, colon, value = (part.strip() for part in content.partition(": "))
        if not indent:
            node |= {key: value} if colon else {}
            continue
        if not gpus or not content:
            continue
        while parents and parents[-1][0] >= indent:
            parents.pop()
        parents.append((indent, key.removesuffix(" :")))
        if colon:
            gpus[-1][1]["/".join(name for _, name in parents)] = value
    reports = (GpuReport(index=index, bus_id=bus, entries=entries) for index, (bus, entries) in enumerate(gpus))
    return node, tuple(reports)


def judge_each(
    output: Output, site: Site, findings: Callable[[GpuReport], Sequence[Verdict]], healthy: str, unit: str = "GPU"
) -> Verdict:
    """All GPUs of a report judged one by one; `findings` returns nothing for a healthy one.

    Sentences about a GPU begin with its index; `healthy` is the summary when there are none, with {gpus} for how many
    were judged. Counters are joined.
    """
    blocked = nvidia_smi.blocked(output, site)
    if blocked:
        return blocked
    _, reports = parse(output.text)
    if not reports:
        return Verdict(level="unknown", summary=f"nvidia-smi -q lists no GPU ({output.first_line}); run it on the node")
    verdicts = [
        Verdict(
            level=found.level,
            summary=f"{unit} {report.index} {found.summary}",
            action=found.action,
        )
        for report in reports
        for found in findings(report)
    ]
    return (
        merge(verdicts) if verdicts else Verdict(level="ok", summary=healthy.format(gpus=counted(len(reports), "GPU")))
    )

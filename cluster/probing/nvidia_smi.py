"""Reading nvidia-smi: queries as shell text and rows, the whole report of `-q`, and the meaning of its exit status.

Exit statuses: the nvidia-smi manual, "Return value"; the actions follow Azure/azurehpc-health-checks where it has one.
Old and new drivers share the text form of `-q`: a field that a driver lacks is absent or `N/A`, while one unknown field
makes a whole `--query-gpu` fail.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from cluster.files.errors import counted
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Action, Verdict, fail, merge, ok, unknown

ABSENT = 127  # the shell's status for a program it cannot find
NO_DEVICES = 6
# nvidia-smi takes seconds to start per GPU when persistence mode is off, and hangs when a GPU does.
SECONDS = 30.0

# Ends a probe with status ABSENT where there is no driver; every script here begins with it.
REQUIRE = "command -v nvidia-smi >/dev/null 2>&1 || exit 127\n"

_EXITS: dict[int, tuple[str, Action]] = {
    4: ("may not read the GPUs as this user", "none"),
    8: ("finds a GPU without its external power cable", "isolate"),
    9: ("cannot talk to the driver: it is not loaded", "reboot"),
    10: ("reports an interrupt problem with a GPU", "reboot"),
    12: ("does not find the NVML library: the driver is installed incompletely", "isolate"),
    13: ("finds an NVML library of another version", "reboot"),
    14: ("reports a corrupted InfoROM", "isolate"),
    15: ("finds that a GPU has fallen off the bus", "reboot"),
    18: ("finds a kernel driver of another version than its library", "reboot"),
}
# Messages about single GPUs, sometimes with status 0 or 255.
_MESSAGES: tuple[tuple[str, Action], ...] = (
    ("Unable to determine the device handle", "reboot"),
    ("GPU is lost", "reboot"),
    ("GPU requires reset", "reset"),
    ("Unknown Error", "reboot"),
    ("Driver/library version mismatch", "reboot"),
)


def query(fields: Sequence[str], table: str = "gpu") -> str:
    """The command that prints these fields, one GPU (or one row of another table) per line, without units."""
    return f"nvidia-smi --query-{table}={','.join(fields)} --format=csv,noheader,nounits"


def parse(text: str, fields: Sequence[str]) -> list[dict[str, str]]:
    """Rows of `query`'s output; lines with another number of fields are messages, not rows, and are left out.

    The last field may hold commas (process names do).
    """
    rows = []
    for line in text.splitlines():
        values = [value.strip() for value in line.split(",", len(fields) - 1)]
        if len(values) == len(fields):
            rows.append(dict(zip(fields, values, strict=True)))
    return rows


def has_no_gpu(output: Output) -> bool:
    """True when the machine has no driver program, or the driver no device."""
    return output.exit_status == ABSENT or output.exit_status == NO_DEVICES or "No devices were found" in output.text


def trouble(output: Output) -> Verdict | None:
    """The problem that exit status or messages report, or None."""
    status = output.exit_status
    if status in _EXITS:
        meaning, action = _EXITS[status]
        summary = f"nvidia-smi {meaning} (exit status {status}: {output.first_line})"
        return unknown(summary) if action == "none" else fail(summary, action)
    for message, action in _MESSAGES:
        if found := next((line for line in output.lines if message in line), None):
            return fail(f"nvidia-smi cannot read a GPU ({Output(text=found).first_line})", action)
    if status:
        return unknown(f"nvidia-smi ended with status {status} ({output.first_line}); run it on the node")
    return None


def blocked(output: Output, site: Site) -> Verdict | None:
    """The verdict of a check whose input nvidia-smi could not print; None when there is something to judge.

    The check `gpus` names the fault and its remedy; the other checks are unknown, so that one fault is one failure.
    """
    if has_no_gpu(output):
        return unknown("nvidia-smi finds no GPU; see gpus") if site.gpus.count else ok("no GPU")
    return unknown(f"nvidia-smi has trouble ({output.first_line}); see gpus") if trouble(output) else None


# Top-level entries of a GPU that some check reads; the rest of some 300 lines per GPU stays on the node.
_SECTIONS = (
    "Product Name|Persistence Mode|VBIOS Version|GPU Recovery Action|ECC |Remapped Rows|Temperature|GPU Power Readings|"
    "Power Readings|Clocks Event Reasons|Clocks Throttle Reasons|Max Clocks|Applications Clocks|"
    "Default Applications Clocks|Fabric"
)
REPORT = Probe(
    script=f"""{REQUIRE}
report=$(nvidia-smi -q) || {{ status=$?; printf '%s\\n' "$report" | head -n 50; exit "$status"; }}
printf '%s\\n' "$report" | awk '/^[^ ]/ {{ print; next }} /^    [^ ]/ {{ keep = $0 ~ /^    ({_SECTIONS})/ }} keep' |
    sed 's/  *: /: /'
""",
    seconds=SECONDS,
)
_GPU_LINE = re.compile(r"GPU ([0-9A-Fa-f]+:[0-9A-Fa-f]+:[0-9A-Fa-f]+\.[0-9A-Fa-f]+)")
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
def parse_report(text: str) -> tuple[Mapping[str, str], tuple[GpuReport, ...]]:
    """The report's entries for the node (`Driver Version`, `CUDA Version`), and for each GPU in order."""
    node: dict[str, str] = {}
    gpus: list[tuple[str, dict[str, str]]] = []
    parents: list[tuple[int, str]] = []
    for line in text.splitlines():
        content = line.strip()
        indent = len(line) - len(line.lstrip())
        if match := _GPU_LINE.match(line):
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


def judge_each(output: Output, site: Site, findings: Callable[[GpuReport], Iterable[Verdict]], healthy: str) -> Verdict:
    """All GPUs of a report judged one by one; `findings` returns nothing for a healthy one.

    Sentences about a GPU begin with its index; `healthy` is the summary when there are none, with {gpus} for how many
    were judged.
    """
    nothing = blocked(output, site)
    if nothing:
        return nothing
    _, reports = parse_report(output.text)
    if not reports:
        return unknown(f"nvidia-smi -q lists no GPU ({output.first_line}); run it on the node")
    found = [(gpu.index, verdict) for gpu in reports for verdict in findings(gpu)]
    verdicts = [replace(verdict, summary=f"GPU {index} {verdict.summary}") for index, verdict in found]
    return merge(verdicts) if verdicts else ok(healthy.format(gpus=counted(len(reports), "GPU")))

"""Reading nvidia-smi: queries as shell text, rows as dictionaries, and the meaning of its exit status.

Exit statuses: the nvidia-smi manual, "Return value"; the actions follow Azure/azurehpc-health-checks where it has one.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.inventory.site import Site
from cluster.probing.probe import Output
from cluster.probing.verdict import Action, Verdict

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
        return Verdict(
            level="unknown" if action == "none" else "fail",
            summary=f"nvidia-smi {meaning} (exit status {status}: {output.first_line})",
            action=action,
        )
    for message, action in _MESSAGES:
        if message in output.text:
            line = next(line for line in output.text.splitlines() if message in line)
            found = Output(text=line).first_line
            return Verdict(level="fail", summary=f"nvidia-smi cannot read a GPU ({found})", action=action)
    if status:
        return Verdict(
            level="unknown",
            summary=f"nvidia-smi ended with status {status} ({output.first_line}); run it on the node",
        )
    return None


def blocked(output: Output, site: Site) -> Verdict | None:
    """The verdict of a check whose input nvidia-smi could not print; None when there is something to judge.

    The check `gpus` names the fault and its remedy; the other checks are unknown, so that one fault is one failure.
    """
    if has_no_gpu(output):
        if site.gpus.count:
            return Verdict(level="unknown", summary="nvidia-smi finds no GPU; see gpus")
        return Verdict(level="ok", summary="no GPU")
    if trouble(output):
        return Verdict(level="unknown", summary=f"nvidia-smi has trouble ({output.first_line}); see gpus")
    return None

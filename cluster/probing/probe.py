"""All probes of a node in one shell script, and the output of each probe, read from that of the script.

One remote command runs every check (the idea of facebookresearch/gcm's checks, but one round trip instead of one each).
The probes run side by side, each under its own `timeout`, and every line is sent as it is printed, marked with the
probe's name: a probe that hangs, even in the kernel, does not affect the others. The node's time at begin and end is
printed too.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

_PROBE_NAME = re.compile(r"[a-z][a-z0-9_]*")
_BEGIN, _END = "@begin", "@end"  # no probe's name
_KILLED = (124, 137)  # exit statuses of timeout(1) when it ended its command with TERM, or with KILL

# Shell text for probes that read the kernel's files below /sys and /proc.
# `value FILE` leaves the file's first line in $v; `?` where it cannot be read.
VALUE = """
value() { v='?'; [ -r "$1" ] && read -r v <"$1"; }
"""
# `gpus` prints the folder of each GPU: 0x10de is NVIDIA, classes 0x0300 and 0x0302 are its GPUs.
GPUS = f"""{VALUE}
gpus() {{
    for device in /sys/bus/pci/devices/*; do
        value "$device/vendor"; [ "$v" = 0x10de ] || continue
        value "$device/class"; case $v in 0x0300* | 0x0302*) printf '%s\\n' "$device" ;; esac
    done
}}
"""
# Prints the line `machine virtual` or `machine real`.
MACHINE = """
grep -qw hypervisor /proc/cpuinfo && echo 'machine virtual' || echo 'machine real'
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Probe:
    """A POSIX shell script that reads something of a node and changes nothing."""

    script: str
    seconds: float = 10.0  # afterwards the node ends it


@dataclass(frozen=True, kw_only=True, slots=True)
class Output:
    """The output of a probe, both streams together, and its exit status."""

    text: str
    exit_status: int | None = 0  # None: still running when the node's deadline passed

    @property
    def timed_out(self) -> bool:
        """True when the probe did not end by itself."""
        return self.exit_status is None or self.exit_status in _KILLED

    @property
    def lines(self) -> list[str]:
        """Its lines, without their line breaks."""
        return self.text.splitlines()

    @property
    def said(self) -> dict[str, str]:
        """By the first word of each line, the rest of it; the last line of a word wins."""
        return dict(line.partition(" ")[::2] for line in self.lines)

    def rows(self, tag: str) -> list[str]:
        """The lines that begin with this word, without it."""
        return [line.removeprefix(f"{tag} ") for line in self.lines if line.startswith(f"{tag} ")]

    @property
    def first_line(self) -> str:
        """The first line that is not blank, shortened and printable; "" when there is none."""
        for line in self.text.splitlines():
            if line.strip():
                return printable(line.strip()[:160])
        return ""


def render_script(probes: Mapping[str, Probe], mark: str) -> str:
    """The script that runs all probes. `mark` begins every line of theirs and must be unguessable to their output.

    The script is one function called on its last line, so that a shell which got half of it runs nothing.
    """
    assert re.fullmatch(r"[0-9a-zA-Z]+", mark), mark
    assert all(_PROBE_NAME.fullmatch(name) for name in probes), list(probes)
    calls = "\n".join(
        f"    probe {name} {math.ceil(probe.seconds)} {shlex.quote(probe.script)} &" for name, probe in probes.items()
    )
    return f"""\
export LC_ALL=C
# A command over SSH gets a short PATH; df, ps and nvidia-smi live in these as well.
PATH=$PATH:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin:/usr/local/nvidia/bin
probe() {{  # name, seconds, script
    {{
        timeout -k 2 "$2" sh -c "$3" </dev/null 2>&1
        printf '\\nexit %s\\n' "$?"
    }} | while IFS= read -r line || [ -n "$line" ]; do printf '%s %s %s\\n' {mark} "$1" "$line"; done
}}
clock() {{
    printf '%s %s %s\\n' {mark} "$1" "$(date +%s.%N)"
}}
main() {{
    command -v timeout >/dev/null || {{ echo "timeout is missing: install coreutils" >&2; exit 127; }}
    clock {_BEGIN}
{calls}
    wait
    clock {_END}
}}
main
"""


def parse_outputs(text: str, mark: str) -> dict[str, Output]:
    """Output of each probe by name, from what the script printed so far; other lines are left out."""
    lines: dict[str, list[str]] = {}
    for line in text.splitlines():
        start, _, rest = line.partition(" ")
        name, _, content = rest.partition(" ")
        if start == mark and name not in (_BEGIN, _END):
            lines.setdefault(name, []).append(content)
    return {name: _output(printed) for name, printed in lines.items()}


def parse_times(text: str, mark: str) -> tuple[float | None, float | None]:
    """The node's clock, in seconds since 1970, before its first probe began and after its last ended."""
    times: dict[str, float] = {}
    for line in text.splitlines():
        start, _, rest = line.partition(" ")
        name, _, content = rest.partition(" ")
        if start == mark and name in (_BEGIN, _END) and re.fullmatch(r"\d+\.\d+", content):
            times[name] = float(content)
    return times.get(_BEGIN), times.get(_END)


def printable(text: str) -> str:
    """The text without control characters, so that a node's output cannot control the reader's terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def _output(printed: list[str]) -> Output:
    """The last line is `exit STATUS`, behind a line break that may add one empty line."""
    match = re.fullmatch(r"exit (\d+)", printed[-1])
    if not match:
        return Output(text="\n".join(printed), exit_status=None)
    body = printed[:-2] if len(printed) > 1 and not printed[-2] else printed[:-1]
    return Output(text="\n".join(body), exit_status=int(match[1]))

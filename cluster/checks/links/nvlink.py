"""NVLink: are all links of every GPU up, and do they count errors?"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

from cluster.checks import BoardCheck, Rise
from cluster.inventory.site import Site
from cluster.probing import nvidia_smi
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import Verdict, merge, with_facts
from cluster.profiles import NO_GPUS, Board

# Error counters that are zero stay on the node: there are hundreds. Drivers without counters end with an error.
PROBE = Probe(
    script=f"""{nvidia_smi.REQUIRE}
printf 'gpus %s\n' "$(nvidia-smi -L | grep -c '^GPU ')"
nvidia-smi nvlink -s || exit
echo errors
errors=$(nvidia-smi nvlink -e) || {{ printf 'no counters: %s\\n' "$errors" | head -n 2; exit 0; }}
printf '%s\\n' "$errors" | grep -v ': 0$'
exit 0
""",
    seconds=nvidia_smi.SECONDS,
)
_COUNT = re.compile(r"^gpus (\d+)$", re.MULTILINE)
_GPU = re.compile(r"GPU (\d+):")
_LINK = re.compile(r"\s+Link (\d+): (.+)")
# "Replay Errors: 3", of newer drivers also "Link recovery failed events: 1". FEC counters count corrected symbols,
# which are normal; totals repeat other counters.
_ERRORS = re.compile(r"(?!FEC |Total )(.*(?:error|recovery).*): (\d+)$", re.IGNORECASE)
_SPEED = re.compile(r"([\d.]+) GB/s")


# replay: a packet was sent again. crc: a packet arrived damaged. recovery: the link stopped and was trained again.
# unrecovered: it could not be. other: what newer drivers count beside these.
ErrorClass = Literal["replay", "crc", "recovery", "unrecovered", "other"]
_CLASSES: tuple[ErrorClass, ...] = ("replay", "crc", "recovery", "unrecovered", "other")


@dataclass(slots=True)
class _Links:
    """The links of one GPU."""

    up: set[int] = field(default_factory=set)
    down: set[int] = field(default_factory=set)
    errors: Counter[ErrorClass] = field(default_factory=Counter)
    worst: set[int] = field(default_factory=set)  # links that counted errors


def judge(output: Output, site: Site, board: Board = NO_GPUS) -> Verdict:
    """Fails when a link of a GPU is down, missing or could not recover; warns on recoveries, and on many other errors.

    A single GPU needs no links, and nvidia-smi lists none for a single GPU of a virtual machine.
    """
    blocked = nvidia_smi.blocked(output, site)
    if blocked:
        return blocked
    gpus = _read(output.text)
    if not gpus:
        count = _COUNT.search(output.text)
        if count and int(count[1]) == 1 and (site.gpus.count or 1) == 1:
            return Verdict(level="ok", summary="one GPU, of which no links are listed")
        return Verdict(level="unknown", summary=f"nvidia-smi nvlink lists no GPU ({output.first_line})")
    counters = {f"gpu{index} {kind}": gpu.errors[kind] for index, gpu in gpus.items() for kind in _CLASSES}
    if len(gpus) == 1 and (site.gpus.count or 1) == 1:
        return Verdict(level="ok", summary="one GPU, so no links to others", facts={"counters": counters})
    if board.profile is None:
        return Verdict(level="unknown", summary=board.no_profile)
    wanted = board.profile.nvlink
    verdicts = []
    for index, gpu in gpus.items():
        if len(gpu.up) < wanted.links:
            named = f" (down: {', '.join(map(str, sorted(gpu.down)))})" if gpu.down else ""
            summary = (
                f"GPU {index} has {len(gpu.up)} of {wanted.links} links up{named}: reset it, then look at the board"
            )
            verdicts.append(Verdict(level="fail", summary=summary, action="reset"))
        elif gpu.errors["unrecovered"] or gpu.errors["recovery"] or gpu.errors.total() >= wanted.warn_errors:
            counted = ", ".join(f"{gpu.errors[kind]} {kind}" for kind in _CLASSES if gpu.errors[kind])
            summary = f"GPU {index} counts errors on link {', '.join(map(str, sorted(gpu.worst)))}: {counted}"
            if gpu.errors["unrecovered"]:
                verdicts.append(Verdict(level="fail", summary=summary, action="reset"))
            else:
                verdicts.append(Verdict(level="warn", summary=summary, action="monitor"))
    if not verdicts:
        verdicts.append(Verdict(level="ok", summary=f"{wanted.links} links up on each of {len(gpus)} GPUs"))
    return with_facts(merge(verdicts), counters=counters)


def _read(text: str) -> dict[int, _Links]:
    status, _, errors = text.partition("\nerrors\n")
    gpus: dict[int, _Links] = {}
    for part, counting in ((status, False), (errors, True)):
        gpu = None
        for line in part.splitlines():
            if match := _GPU.match(line):
                gpu = gpus.setdefault(int(match[1]), _Links())
            elif gpu and (match := _LINK.match(line)):
                link, value = int(match[1]), match[2].strip()
                if not counting:
                    speed = _SPEED.match(value)
                    (gpu.up if speed and float(speed[1]) > 0 else gpu.down).add(link)
                elif counted := _ERRORS.match(value):
                    gpu.errors[_class_of(counted[1].lower())] += int(counted[2])
                    if int(counted[2]):
                        gpu.worst.add(link)
    return gpus


def _class_of(name: str) -> ErrorClass:
    """The class of a counter by its name in lower case."""
    if "recovery" in name:
        return "unrecovered" if "failed" in name else "recovery"
    return "replay" if "replay" in name else "crc" if "crc" in name else "other"


CHECK = BoardCheck(
    source="nvidia-smi nvlink -s and -e; classes: NVIDIA DCGM, gcm; links of the model: cluster/profiles",
    probe=lambda site: PROBE,
    judge=judge,
    rise=Rise(
        level="warn",
        action="monitor",
        meaning="the link repeats transfers and slows its ring down",
        least=5,
        least_of={"recovery": 1, "unrecovered": 1},
    ),
)

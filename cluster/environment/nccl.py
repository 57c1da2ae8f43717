"""NCCL's own settings: what its files on a node say, and the variables that are left to NCCL, each with the reason.

Sources: NCCL's user guide, "Environment Variables"; its initEnv for the order of files: a variable of the environment
wins over the user's file, and that one over /etc/nccl.conf.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cluster.discovery.facts import Setting
from cluster.environment.value import Value, shown


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftAlone:
    """A variable that is not rendered on purpose."""

    name: str
    default: str  # what NCCL does without it
    reason: str  # one sentence without a full stop
    accepts: re.Pattern[str]
    accepted: str  # the same in words


def _left(name: str, default: str, accepts: str, accepted: str, reason: str) -> LeftAlone:
    return LeftAlone(name=name, default=default, reason=reason, accepts=re.compile(accepts), accepted=accepted)


_BYTE = r"\d{1,2}|1\d\d|2[0-4]\d|25[0-5]"
LEFT_ALONE: tuple[LeftAlone, ...] = (
    _left("NCCL_CROSS_NIC", "2: NCCL tries", "[012]", "0, 1 or 2",
          "whether rings may change rails depends on the switches above the adapters, which no node can see: 0 where "
          "every rail has its own, 1 where all share one"),
    _left("NCCL_PXN_DISABLE", "0: used", "[01]", "0 or 1",
          "by PXN a GPU sends through another's adapter over NVLink, so that messages stay on a rail; NCCL uses it "
          "only where NVLink allows, and all-to-all gains most"),
    _left("NCCL_TUNER_PLUGIN", "found by its name", r"\S+", "a library's name or path",
          "a tuner holds the measurements of one kind of cluster; the vendor that installs it names it in nccl.conf"),
    _left("NCCL_TUNER_CONFIG_PATH", "none", r"/.*", "an absolute path",
          "belongs to the tuner that reads it"),
    _left("NCCL_COLLNET_ENABLE", "0: off", "[01]", "0 or 1",
          "SHARP reduces in the switches, which needs a plugin and an aggregation manager; rings send point to point "
          "and gain nothing, and a reserved tree that is busy fails the job's start"),
    _left("NCCL_IB_QPS_PER_CONNECTION", "1", r"[1-9]\d?|1[01]\d|12[0-8]", "1 to 128",
          "more queue pairs spread one connection over the paths of a fabric that routes by hash, and cost elsewhere; "
          "the paper's artifact sets 8, and so does the site file of its reproduction"),
    _left("NCCL_IB_SL", "0", r"\d|1[0-5]", "0 to 15",
          "the service level that the fabric keeps for RDMA is known to its operators alone"),
    _left("NCCL_IB_TC", "0", _BYTE, "0 to 255",
          "the traffic class that RoCE switches keep lossless is known to their operators alone; with a wrong one "
          "packets are dropped under load, so ask for it and set it in the site's environment"),
    _left("NCCL_IB_TIMEOUT", "20 (18 before 2.23)", r"[1-9]|[12]\d|3[01]", "1 to 31",
          "4.1 us x 2^20, tried 8 times, is 34 s until a lost link ends a rank; more hides a broken link, less ends "
          "runs while a switch restarts"),
    _left("NCCL_IB_RETRY_CNT", "7", "[0-7]", "0 to 7",
          "multiplies the timeout; 7 is the most that the transport knows"),
    _left("NCCL_P2P_NET_CHUNKSIZE", "131072", r"[1-9]\d*", "a number of bytes",
          "the pieces in which a ring's blocks cross the network; larger ones can fill a fast link better and take "
          "buffers, and no measurement here says which: time a sweep with both before setting it"),
    _left("NCCL_TOPO_FILE", "read from the kernel", r"/.*", "an absolute path",
          "only a virtual machine that hides its PCI tree needs one; its cloud installs the file and names it in "
          "nccl.conf"),
)  # fmt: skip
_BY_NAME: Mapping[str, LeftAlone] = {left.name: left for left in LEFT_ALONE}


def setting_problem(name: str, value: str) -> str:
    """The problem of a value of one of these variables; "" when there is none, and for all others."""
    left = _BY_NAME.get(name)
    return "" if left is None or left.accepts.fullmatch(value) else f"is no value of it: NCCL takes {left.accepted}"


def left_alone(taken: Sequence[str]) -> list[LeftAlone]:
    """The variables of LEFT_ALONE whose names are not `taken`."""
    return [left for left in LEFT_ALONE if left.name not in taken]


def configured(settings: Sequence[Setting], values: Sequence[Value]) -> tuple[tuple[Value, ...], list[str]]:
    """The values that NCCL takes from its files, and a warning for each line that another value replaces.

    `settings` in NCCL's order: of two lines for one name the first counts, and `values` of the environment win.
    """
    ours = {value.name: value for value in values}
    taken: dict[str, Value] = {}
    warnings = []
    for setting in settings:
        place = f"line {setting.line} of {setting.file}"
        text = f"{setting.name}={shown(setting.name, setting.value)}"
        rival = ours.get(setting.name)
        if rival is not None and rival.value != setting.value:
            instead = shown(rival.name, rival.value)
            warnings.append(f"{place} says {text}, but the environment wins with {instead} ({rival.reason})")
        elif rival is None and setting.name in taken:
            if taken[setting.name].value != setting.value:
                warnings.append(f"{place} says {text}, but {taken[setting.name].reason} comes first")
        elif rival is None:
            taken[setting.name] = Value(name=setting.name, value=setting.value, reason=place, origin="file")
    return tuple(taken.values()), warnings

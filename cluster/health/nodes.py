"""Checking nodes: all at once, one remote command each, and a report for every node."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cluster.checks import Check, conclude
from cluster.checks.gpu import gpus
from cluster.inventory.checkout import difference, own_versions
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe, parse_outputs, parse_times, render_script
from cluster.probing.verdict import Action, Level, Verdict, ok, strongest_action, unknown, warn, worst_level
from cluster.profiles import Board, Profiles, default_profiles
from cluster.transport.fleet import on_each
from cluster.transport.runner import Connect, Runner, Unreachable

REACHABILITY = "reachability"
CLOCK = "clock"
SOFTWARE = "software"
_NEEDED = (REACHABILITY, SOFTWARE, "docker", "gpu")  # names of checks, or their beginnings
_SLOWER = 2.0  # a probe that did not end in time runs once more, with so many times its seconds
_GPUS = "gpus"  # the check that also finds the model, whose thresholds hold


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """All findings about one node."""

    host: Host
    verdicts: Mapping[str, Verdict]  # by check; reachability always, the others only when the node answered
    seconds: float
    site: str = ""  # the name of the site it was judged by; empty for a machine without one

    @property
    def level(self) -> Level:
        """The worst of all checks."""
        return worst_level(verdict.level for verdict in self.verdicts.values())

    @property
    def action(self) -> Action:
        """The strongest action of all checks."""
        return strongest_action(verdict.action for verdict in self.verdicts.values())

    @property
    def busy(self) -> bool:
        """True when other processes use the node."""
        return any(verdict.busy for verdict in self.verdicts.values())

    @property
    def answered(self) -> bool:
        """True when the node answered."""
        return self.verdicts[REACHABILITY].level == "ok"  # added first, for every node

    @property
    def usable(self) -> bool:
        """True when work may be placed here: nothing failed, it is not busy, and no check that decides is unknown."""
        return not self.busy and not any(map(self.decides, self.verdicts))

    def decides(self, name: str) -> bool:
        """True for a finding that keeps work away: a failure, or no answer where work needs one.

        A slow probe of anything else, as on a loaded node, says nothing about the node.
        """
        level = self.verdicts[name].level
        return level == "fail" or (level == "unknown" and name.startswith(_NEEDED))

    def also(self, name: str, verdict: Verdict) -> NodeReport:
        """The same report with one more verdict."""
        return replace(self, verdicts={**self.verdicts, name: verdict})

    def without(self, names: Collection[str]) -> NodeReport:
        """The same report without these verdicts."""
        return replace(self, verdicts={name: one for name, one in self.verdicts.items() if name not in names})


def check_nodes(
    nodes: Sequence[InventoryNode],
    connect: Connect,
    checks: Mapping[str, Check],
    timeout_seconds: float,
    profiles: Profiles | None = None,
) -> Iterator[NodeReport]:
    """Reports as the nodes answer; after `timeout_seconds` and a little grace, the silent ones are reported unknown.

    Each node is judged by its own site. `profiles` None: those of this project.
    """
    profiles = profiles or default_profiles()
    started = time.monotonic()
    work = partial(check_node, connect=connect, checks=checks, profiles=profiles, timeout_seconds=timeout_seconds)
    for node, answer in on_each(nodes, work, timeout_seconds):
        if isinstance(answer, Unreachable):
            yield _unreachable(node, str(answer), time.monotonic() - started)
        else:
            yield answer


def check_node(
    node: InventoryNode,
    connect: Connect,
    checks: Mapping[str, Check],
    profiles: Profiles,
    timeout_seconds: float,
) -> NodeReport:
    """Connect, run the probes of all checks in one command, judge their output by the node's own site."""
    started = time.monotonic()
    host, site = node.host, node.site
    probes = {name: check.probe(site) for name, check in checks.items()}
    probes.setdefault(_GPUS, gpus.probe(site))
    carriers = _carriers(probes)
    mark = secrets.token_hex(8)
    script = render_script({name: probe for probe, name in carriers.items()}, mark)
    outputs: dict[str, Output] = {}
    try:
        with connect(host, timeout_seconds) as runner:
            connected_seconds = time.monotonic() - started
            sent = time.time()
            completed = runner.run(
                ["sh", "-s"], stdin=script, deadline_seconds=max(0.1, timeout_seconds - connected_seconds)
            )
            received = time.time()
            outputs = parse_outputs(completed.stdout, mark)
            outputs |= _asked_again(runner, carriers, outputs, timeout_seconds - (time.monotonic() - started))
    except Unreachable as error:
        return _unreachable(node, str(error), time.monotonic() - started)
    complaint = Output(text=completed.stderr).first_line
    begun, ended = parse_times(completed.stdout, mark)
    reading = ClockReading(sent=sent, begun=begun, ended=ended, received=received)
    verdicts = {
        REACHABILITY: ok("this machine" if host.is_local else f"connected in {connected_seconds:.2f} s"),
        CLOCK: judge_clock(reading, profiles.limits.clock_warn_seconds),
    }

    def verdict(name: str, check: Check, board: Board) -> Verdict:
        probe = probes[name]
        return conclude(check, probe, outputs.get(carriers[probe]), complaint, site, board)

    board = _board(verdict(_GPUS, gpus, profiles.board("", 0)), site, profiles)
    verdicts |= {name: verdict(name, check, board) for name, check in checks.items()}
    if (software := verdicts.get(SOFTWARE)) is not None:
        verdicts[SOFTWARE] = as_here(software)
    return NodeReport(host=host, verdicts=verdicts, seconds=time.monotonic() - started, site=_site_name(site))


def _asked_again(
    runner: Runner, carriers: Mapping[Probe, str], outputs: Mapping[str, Output], seconds: float
) -> dict[str, Output]:
    """Outputs of a second attempt, within `seconds`, at the probes that did not end by themselves; a loaded node is
    slow. One attempt: what hangs in the kernel hangs again."""
    longer = {
        name: replace(probe, seconds=probe.seconds * _SLOWER)
        for probe, name in carriers.items()
        if name in outputs and outputs[name].timed_out and probe.seconds * _SLOWER < seconds
    }
    if not longer:
        return {}
    mark = secrets.token_hex(8)
    done = runner.run(["sh", "-s"], stdin=render_script(longer, mark), deadline_seconds=seconds)
    return {name: output for name, output in parse_outputs(done.stdout, mark).items() if not output.timed_out}


def as_here(software: Verdict) -> Verdict:
    """The verdict on a node's software, which fails where it is not that of this machine: they could not run together.

    Nothing is compared where this program's own interpreter has no Ray, as `check_nodes.py` may.
    """
    own, found = own_versions(), software.facts.get("versions")
    if own["ray"] is None or not isinstance(found, dict) or not (differs := difference(own, found)):
        return software
    return replace(
        software,
        level="fail",
        action="isolate",
        summary=f"{differs}; install the same there, or correct software in its site",
    )


def _site_name(site: Site) -> str:
    """The name of a site that was named; the default of a single machine has none."""
    return "" if site.name == Site().name else site.name


def _carriers(probes: Mapping[str, Probe]) -> dict[Probe, str]:
    """Each distinct probe and the first check that gave it: a probe that several checks share runs once."""
    carriers: dict[Probe, str] = {}
    for name, probe in probes.items():
        carriers.setdefault(probe, name)
    return carriers


def _board(found: Verdict, site: Site, profiles: Profiles) -> Board:
    """The GPUs that answered; when none did, those the site expects, so that their thresholds still hold."""
    models = found.facts.get("models")
    if isinstance(models, dict) and models:
        (name, _), *_ = Counter(models).most_common(1)
        return profiles.board(name, sum(models.values()))
    return profiles.board(site.gpus.model, site.gpus.count) if site.gpus.count else profiles.board("", 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class ClockReading:
    """Seconds since 1970: ours before and after the command, the node's at its begin and end; None: not printed."""

    sent: float
    begun: float | None
    ended: float | None
    received: float


def judge_clock(reading: ClockReading, warn_seconds: float) -> Verdict:
    """Warns when the node is certainly further ahead or behind than this.

    The four-timestamp method of NTP (RFC 5905, section 8): the duration of the probes cancels out, and the offset may
    be wrong by half the duration of both transfers.
    """
    if reading.begun is None or reading.ended is None:
        return unknown("the node did not print its time; its date command may be no GNU date")
    there, back = reading.begun - reading.sent, reading.ended - reading.received
    offset, uncertainty = (there + back) / 2, max(0.0, (there - back) / 2)
    facts = {"offset_seconds": round(offset, 3), "uncertainty_seconds": round(uncertainty, 3)}
    if abs(offset) - uncertainty > warn_seconds:
        side = "ahead of" if offset > 0 else "behind"
        return warn(f"{abs(offset):.1f} s {side} this machine; let chrony or ntpd set both clocks", facts=facts)
    return ok(f"within {max(abs(offset), uncertainty):.2f} s of this machine", facts=facts)


def _unreachable(node: InventoryNode, summary: str, seconds: float) -> NodeReport:
    verdicts = {REACHABILITY: unknown(summary, "monitor")}
    return NodeReport(host=node.host, verdicts=verdicts, seconds=seconds, site=_site_name(node.site))

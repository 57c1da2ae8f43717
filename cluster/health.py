"""Checking nodes: all at once, one remote command each, a report for every one of them whatever happened."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, as_completed
from dataclasses import dataclass
from functools import partial

from cluster.checks import Check, conclude
from cluster.hosts import Host
from cluster.probe import Output, parse_outputs, render_script
from cluster.runner import Connect, Unreachable
from cluster.site import Site
from cluster.verdict import Action, Level, Verdict, strongest_action, worst_level

REACHABILITY = "reachability"
GRACE_SECONDS = 2.0  # for a node's own deadline to be noticed before ours


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeReport:
    """Everything found out about one node."""

    host: Host
    verdicts: Mapping[str, Verdict]  # by check; reachability always, the others only when the node answered
    seconds: float

    @property
    def level(self) -> Level:
        """The worst of all checks."""
        return worst_level(verdict.level for verdict in self.verdicts.values())

    @property
    def action(self) -> Action:
        """The strongest that any check asks for."""
        return strongest_action(verdict.action for verdict in self.verdicts.values())

    @property
    def usable(self) -> bool:
        """True when work may be placed here: it answered, nothing failed or stayed unknown, and nobody else uses it."""
        busy = any(verdict.busy for verdict in self.verdicts.values())
        return self.level in ("ok", "warn") and not busy


def check_nodes(
    hosts: Sequence[Host], connect: Connect, checks: Mapping[str, Check], site: Site, timeout_seconds: float
) -> Iterator[NodeReport]:
    """Reports as the nodes answer; after `timeout_seconds` and a little grace, the silent ones are reported unknown.

    Each node has a thread that nothing waits for at exit: a name server or a kernel that hangs holds up nobody.
    """
    started = time.monotonic()
    futures = {_start(partial(check_node, host, connect, checks, site, timeout_seconds)): host for host in hosts}
    try:
        for future in as_completed(futures, timeout=timeout_seconds + GRACE_SECONDS):
            del futures[future]
            yield future.result()
    except TimeoutError:
        for host in futures.values():
            summary = (
                f"{host.target} did not answer within {timeout_seconds:g} s; check that it is up, or raise --timeout"
            )
            yield _unreachable(host, summary, time.monotonic() - started)


def check_node(
    host: Host, connect: Connect, checks: Mapping[str, Check], site: Site, timeout_seconds: float
) -> NodeReport:
    """Connect, run the probes of all checks in one command, judge what came back."""
    started = time.monotonic()
    probes = {name: check.probe(site) for name, check in checks.items()}
    mark = secrets.token_hex(8)
    try:
        with connect(host, timeout_seconds) as runner:
            connected_seconds = time.monotonic() - started
            completed = runner.run(
                ["sh", "-s"],
                stdin=render_script(probes, mark),
                deadline_seconds=max(0.1, timeout_seconds - connected_seconds),
            )
    except Unreachable as error:
        return _unreachable(host, str(error), time.monotonic() - started)
    outputs = parse_outputs(completed.stdout, mark)
    complaint = Output(text=completed.stderr).first_line
    how = "this machine" if host.is_local else f"connected in {connected_seconds:.2f} s"
    verdicts = {REACHABILITY: Verdict(level="ok", summary=how)}
    for name, check in checks.items():
        verdicts[name] = conclude(check, probes[name], outputs.get(name), complaint, site)
    return NodeReport(host=host, verdicts=verdicts, seconds=time.monotonic() - started)


def _unreachable(host: Host, summary: str, seconds: float) -> NodeReport:
    verdict = Verdict(level="unknown", summary=summary, action="monitor")
    return NodeReport(host=host, verdicts={REACHABILITY: verdict}, seconds=seconds)


def _start(work: Callable[[], NodeReport]) -> Future[NodeReport]:
    """Run `work` in a daemon thread; whatever it raises is raised again by the future's `result`."""
    future: Future[NodeReport] = Future()

    def body() -> None:
        try:
            future.set_result(work())
        except BaseException as error:  # noqa: BLE001 - handed over, not hidden
            future.set_exception(error)

    threading.Thread(target=body, daemon=True).start()
    return future

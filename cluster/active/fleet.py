"""Running the active tests: the worker on every free node, then the exchanges between them."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from cluster.active.judge import Pair, Speed, judge_pairs, judge_speeds, rounds, second_pass, worked
from cluster.active.measurement import Device, NodeSpeeds, Unavailable, found, read_speeds
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Site
from cluster.probing.verdict import Verdict
from cluster.profiles import Profiles
from cluster.transport.fleet import on_each
from cluster.transport.runner import Connect, Runner, Unreachable

_OUR_FOLDER = Path(__file__).parents[2]
_LIBRARIES = ("NCCL_", "GLOO_", "TORCH_", "CUDA_", "UCX_", "LD_LIBRARY_PATH")
_START_SECONDS = 60.0  # from a command to its first output: an interpreter, torch and a driver have to start


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """How the active tests are run."""

    connect: Connect
    profiles: Profiles
    device: Device = "cuda"
    node_seconds: float = 300.0
    pair_seconds: float = 120.0
    say: Callable[[str], None] = lambda sentence: None  # called before each step


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """Verdicts by node, then by test; and the speed of every pair that was tried."""

    verdicts: Mapping[str, Mapping[str, Verdict]]
    pairs: Mapping[Pair, Speed]


def run_active(nodes: Sequence[InventoryNode], plan: Plan) -> Findings:
    """Load these nodes, which must be free."""
    by_name = {node.name: node for node in nodes}
    plan.say(f"active tests: {'1 node by itself' if len(nodes) == 1 else f'{len(nodes)} nodes by themselves'}")
    answers: dict[str, NodeSpeeds | Unavailable] = {}
    for node, answer in on_each(nodes, partial(_measure, plan), plan.node_seconds + _START_SECONDS):
        answers[node.name] = Unavailable(reason=str(answer)) if isinstance(answer, Unreachable) else answer
    verdicts = {node: dict(tests) for node, tests in judge_speeds(answers, plan.profiles).items()}
    able = [node.name for node in nodes if isinstance(answers[node.name], NodeSpeeds)]
    pairs: dict[Pair, Speed] = {}
    for number, group in enumerate(steps := rounds(able), start=1):
        plan.say(f"active tests: pairs, round {number} of {len(steps)}")
        pairs |= _exchange_all(plan, by_name, group)
    again: dict[Pair, Speed] = {}
    for group in second_pass(worked(pairs)):
        plan.say("active tests: nodes that failed, each with one that did not")
        again |= _exchange_all(plan, by_name, group)
    for name, verdict in judge_pairs(pairs, again, plan.profiles.limits).items():
        verdicts[name]["active_pairs"] = verdict
    return Findings(verdicts=verdicts, pairs=pairs)


def worker_command(site: Site, *arguments: str) -> list[str]:
    """The worker on a node of this site, with the variables the site gives to communication libraries."""
    chosen = {name: value for name, value in site.environment.items() if name.startswith(_LIBRARIES)}
    if site.network.interface:
        chosen = {"GLOO_SOCKET_IFNAME": site.network.interface,
                  "NCCL_SOCKET_IFNAME": f"={site.network.interface}"} | chosen  # fmt: skip
    if site.network.hcas:
        chosen = {"NCCL_IB_HCA": "=" + ",".join(site.network.hcas)} | chosen
    chosen["PYTHONPATH"] = site.software.folder or str(_OUR_FOLDER)
    variables = [f"{name}={value}" for name, value in chosen.items()]
    return ["env", *variables, site.software.python or sys.executable, "-m", "cluster.active", *arguments, "--attended"]


def _measure(plan: Plan, node: InventoryNode) -> NodeSpeeds | Unavailable:
    if node.site.container.engine != "none":
        return Unavailable(reason="active tests do not start containers; run them inside one, or with engine: none")
    command = worker_command(node.site, "speeds", "--device", plan.device, "--seconds", f"{plan.node_seconds:g}")
    with plan.connect(node.host, _START_SECONDS) as runner, _open_stdin() as line:
        done = runner.run(command, stdin=line, deadline_seconds=plan.node_seconds)
    if done.exit_status is None:
        return Unavailable(reason=f"the node's own tests did not end within {plan.node_seconds:g} s; look for a hang")
    return read_speeds(done.stdout) or Unavailable(reason=_why(done.stdout, done.stderr))


def _exchange_all(plan: Plan, by_name: Mapping[str, InventoryNode], group: Sequence[Pair]) -> dict[Pair, Speed]:
    """One round: all its pairs side by side."""
    answers = on_each(group, partial(exchange, plan, by_name), plan.pair_seconds + _START_SECONDS)
    return {pair: answer if isinstance(answer, float) else str(answer) for pair, answer in answers}


def exchange(plan: Plan, by_name: Mapping[str, InventoryNode], pair: Pair) -> Speed:
    """GB/s between two nodes, or the reason why there is none."""
    one, other = (by_name[name] for name in pair)
    conversation = Conversation(
        opener=("pair",), caller=lambda place: ("pair", "--store", place), answer="pair", seconds=plan.pair_seconds
    )
    answer = converse(plan, one, other, conversation)
    return answer if isinstance(answer, str) else float(answer["gb_per_second"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """Commands of two workers. The opener prints where it listens, ports or address and port; the caller connects."""

    opener: tuple[str, ...]
    caller: Callable[[str], tuple[str, ...]]
    answer: str  # the kind of line with the result, which the caller prints
    seconds: float
    both_answer: bool = True  # False: the opener only listens, and is ended when the caller has answered


def converse(plan: Plan, one: InventoryNode, other: InventoryNode, conversation: Conversation) -> dict[str, Any] | str:
    """The caller's answer, or the reason why there is none; `one` opens, `other` calls."""
    common = ("--device", plan.device, "--seconds", f"{conversation.seconds:g}")
    with (
        plan.connect(one.host, _START_SECONDS) as first,
        plan.connect(other.host, _START_SECONDS) as second,
        _open_stdin() as line,
    ):
        opener = _ListeningWorker()
        command = worker_command(one.site, *conversation.opener, *common, "--node", "0", "--peer", _address(other))
        thread = threading.Thread(target=opener.run, args=(first, command, line, conversation.seconds), daemon=True)
        thread.start()
        port = opener.wait_for_port(_START_SECONDS)
        if port is None:
            return f"{one.name}: {opener.why()}"
        arguments = (*conversation.caller(port), *common, "--node", "1", "--peer", _address(one))
        with _open_stdin() as other_line:
            done = second.run(
                worker_command(other.site, *arguments), stdin=other_line, deadline_seconds=conversation.seconds
            )
        answer = found(done.stdout, conversation.answer)
        if answer is None:
            return f"{other.name}: {_why(done.stdout, done.stderr)}"
        if not conversation.both_answer:
            return answer
        thread.join(_START_SECONDS)
        if found(opener.text, conversation.answer) is None:
            return f"{one.name}: {opener.why()}"
        return answer


class _ListeningWorker:
    """Node 0 of a pair: its command runs in a thread, and prints the port to connect to."""

    def __init__(self) -> None:
        self.text = ""
        self._port_or_end = threading.Event()
        self._broken = ""

    def run(self, runner: Runner, command: Sequence[str], line: Iterable[bytes], seconds: float) -> None:
        try:
            runner.stream(command, self._on_line, stdin=line, deadline_seconds=seconds)
        except Unreachable as error:
            self._broken = str(error)
        finally:
            self._port_or_end.set()

    def wait_for_port(self, seconds: float) -> str | None:
        """The port, several with commas between them, or address:port; None when none was printed."""
        self._port_or_end.wait(seconds)
        answer = found(self.text, "port")
        return str(answer["port"]) if answer else None

    def why(self) -> str:
        return self._broken or _why(self.text, "")

    def _on_line(self, line: str) -> None:
        self.text += line.rstrip("\n") + "\n"
        if found(line, "port"):
            self._port_or_end.set()


@contextlib.contextmanager
def _open_stdin() -> Iterator[Iterable[bytes]]:
    """Standard input that stays open until the block is left, or this program ends: an attended worker ends with it."""
    left = threading.Event()

    def hold() -> Iterator[bytes]:
        left.wait()
        yield from ()

    try:
        yield hold()
    finally:
        left.set()


def _address(node: InventoryNode) -> str:
    return node.host.address or "127.0.0.1"


def _why(stdout: str, stderr: str) -> str:
    """The worker's own reason, else the last line of its output."""
    for kind in ("failure", "unavailable"):
        content = found(stdout, kind)
        if content:
            return str(content.get("reason"))
    lines = [line.strip() for line in (stderr or stdout).splitlines() if line.strip()]
    return lines[-1][:300] if lines else "the worker ended without output"

"""Verdicts of a node and of a fleet."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cluster.checks import check, discover
from cluster.health.nodes import ClockReading, NodeReport, check_nodes, judge_clock
from cluster.inventory.hosts import Host
from cluster.inventory.nodes import InventoryNode
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe
from cluster.probing.verdict import EXIT_CODES, LEVELS, Level, Verdict, merge, worst_level
from cluster.profiles import Board
from cluster.transport import fleet
from cluster.transport.reach import LocalRunner, connect_local
from cluster.transport.runner import Runner
from tests.patience import AMPLE, scaled

LOCAL = Host(name="here")
HERE = InventoryNode(host=LOCAL, site=Site())


def report(*verdicts: Verdict) -> NodeReport:
    return NodeReport(host=LOCAL, verdicts={str(n): verdict for n, verdict in enumerate(verdicts)}, seconds=0.0)


@pytest.mark.parametrize("worst", LEVELS)
def test_the_worst_level_counts_and_a_proven_fault_outweighs_not_knowing(worst: Level) -> None:
    below = LEVELS[: LEVELS.index(worst) + 1]
    assert worst_level(below) == worst_level(reversed(below)) == worst
    assert LEVELS[-2:] == ("unknown", "fail")


def test_every_level_has_its_exit_code() -> None:
    assert EXIT_CODES == {"ok": 0, "warn": 1, "fail": 2, "unknown": 3}


@pytest.mark.parametrize(
    ("level", "busy", "usable"),
    [
        ("ok", False, True),
        ("warn", False, True),
        ("warn", True, False),
        ("ok", True, False),
        ("fail", False, False),
        ("unknown", False, True),  # of a check of this name; see the next test
    ],
)
def test_only_a_node_known_to_be_sound_and_free_is_usable(level: Level, busy: bool, usable: bool) -> None:
    assert report(Verdict(level="ok", summary=""), Verdict(level=level, busy=busy, summary="")).usable is usable


@pytest.mark.parametrize(
    ("name", "usable"),
    [("reachability", False), ("software", False), ("gpus", False), ("gpu_memory", False), ("cpu_idle", True)],
)
def test_only_an_answer_that_work_needs_keeps_it_away_by_its_absence(name: str, usable: bool) -> None:
    silent = NodeReport(host=LOCAL, verdicts={name: Verdict(level="unknown", summary="")}, seconds=0.0)
    assert (silent.usable, silent.level) == (usable, "unknown")


def test_a_node_asks_for_the_strongest_action_of_its_checks() -> None:
    verdicts = [Verdict(level="fail", summary="", action="reset"), Verdict(level="warn", summary="", action="monitor")]
    assert report(*verdicts).action == "reset"


def test_merging_keeps_the_sentences_of_the_worst_level_and_all_facts() -> None:
    parts = [
        Verdict(level="fail", summary="a is full", facts={"a": 1}),
        Verdict(level="ok", summary="b is fine", facts={"b": 2}),
        Verdict(level="fail", summary="c is full", action="isolate", facts={"c": 3}),
    ]
    merged = merge(parts)
    assert (merged.level, merged.summary, merged.action) == ("fail", "a is full; c is full", "isolate")
    assert merged.facts == {"a": 1, "b": 2, "c": 3}


def test_every_check_is_found_by_its_file_name_and_names_its_source() -> None:
    checks = discover()
    assert list(checks) == sorted(checks)
    assert {"disk", "gpus", "gpu_memory", "host_memory"} <= set(checks)
    assert all(one.source for one in checks.values())


@pytest.mark.parametrize("name", list(discover()))
def test_no_check_takes_silence_or_noise_for_health(name: str) -> None:
    for text in ("", "command not found", "\x1b[31m", "0," * 50):
        verdict = discover()[name].judge(Output(text=text, exit_status=1), Site())
        assert verdict.level in ("unknown", "fail"), text


def test_one_probe_that_hangs_leaves_the_other_verdicts() -> None:
    def judge(output: Output, site: Site, board: Board) -> Verdict:
        return Verdict(level="ok", summary=output.text)

    checks = {
        "hangs": check(Probe(script="sleep 600", seconds=1), "x")(judge),
        "works": check(Probe(script="echo fine"), "x")(judge),
    }
    (only,) = check_nodes([HERE], connect_local, checks, AMPLE)
    assert {name: verdict.level for name, verdict in only.verdicts.items()} == {
        "reachability": "ok",
        "clock": "ok",
        "hangs": "unknown",
        "works": "ok",
    }


def test_a_probe_that_is_slow_once_is_asked_once_more(tmp_path: Path) -> None:
    def judge(output: Output, site: Site, board: Board) -> Verdict:
        return Verdict(level="ok", summary=output.text)

    script = f"[ -e {tmp_path}/once ] && echo fine && exit; touch {tmp_path}/once; sleep 600"
    checks = {"slow": check(Probe(script=script, seconds=1), "x")(judge)}
    (only,) = check_nodes([HERE], connect_local, checks, AMPLE)
    assert (only.verdicts["slow"].level, only.verdicts["slow"].summary) == ("ok", "fine")


def test_a_node_that_never_answers_is_reported_unknown_while_the_others_are_not_held_up(monkeypatch):
    never = threading.Event()

    @contextmanager
    def connect(host: Host, seconds: float) -> Iterator[Runner]:
        if host.name == "stuck":
            never.wait()  # as for a name server that does not answer
        yield LocalRunner()

    monkeypatch.setattr(fleet, "GRACE_SECONDS", 0.1)
    nodes = [InventoryNode(host=Host(name=name), site=Site()) for name in ("stuck", "well")]
    reports = {one.host.name: one for one in check_nodes(nodes, connect, {}, scaled(0.5))}
    never.set()
    assert {name: one.level for name, one in reports.items()} == {"stuck": "unknown", "well": "ok"}
    assert not reports["stuck"].usable


def test_a_mistake_in_a_check_is_raised_not_hidden() -> None:
    def judge(output: Output, site: Site, board: Board) -> Verdict:
        raise KeyError("mistake")

    checks = {"broken": check(Probe(script="true"), "x")(judge)}
    with pytest.raises(KeyError, match="mistake"):
        list(check_nodes([HERE], connect_local, checks, AMPLE))


def reading(ahead: float, out: float = 0.1, back: float = 0.1, work: float = 20.0) -> ClockReading:
    sent = 1000.0
    begun, ended = sent + out + ahead, sent + out + work + ahead
    return ClockReading(sent=sent, begun=begun, ended=ended, received=sent + out + work + back)


@pytest.mark.parametrize(
    ("ahead", "level", "words"),
    [
        (0.0, "ok", "within 0.10 s"),
        (1.05, "ok", "within 1.05 s"),
        (1.2, "warn", "1.2 s ahead of this machine"),
        (-3600.0, "warn", "3600.0 s behind this machine"),
    ],
)
def test_a_clock_is_judged_by_both_ways_however_long_the_work_took(ahead: float, level: str, words: str) -> None:
    verdict = judge_clock(reading(ahead), 1.0)
    assert verdict.level == level
    assert words in verdict.summary


def test_a_slow_way_makes_the_offset_uncertain_not_wrong() -> None:
    assert judge_clock(reading(0.0, out=5.0), 1.0).level == "ok"
    assert judge_clock(reading(4.0, out=5.0), 1.0).level == "warn"


@pytest.mark.parametrize(("begun", "ended"), [(None, None), (1.0, None)])
def test_a_node_that_does_not_say_its_time_is_unknown(begun: float | None, ended: float | None) -> None:
    assert judge_clock(ClockReading(sent=0.0, begun=begun, ended=ended, received=2.0), 1.0).level == "unknown"

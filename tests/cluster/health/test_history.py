"""Counters kept from look to look, and what their growth means."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest

from cluster.checks import discover
from cluster.health import history
from cluster.health.history import CheckRecord, History, entry_of, judge, rises
from cluster.health.nodes import NodeReport
from cluster.inventory.hosts import Host
from cluster.probing.verdict import Verdict

CHECKS = discover()
NOON = datetime(2026, 11, 20, 12, tzinfo=UTC)


def entry(check: str, **counters: int) -> CheckRecord:
    return CheckRecord(time="2026-11-20T12:00:00+00:00", verdict="ok", counters={check: counters})


def test_only_growth_of_a_known_counter_is_a_rise() -> None:
    before = {"same": 3, "grown": 3, "restarted": 9, "gone": 1}
    assert rises(before, {"same": 3, "grown": 5, "restarted": 2, "new": 7}) == {"grown": 2}


@pytest.mark.parametrize(
    ("check", "growth", "level"),
    [
        ("infiniband", 1, "fail"),
        ("gpu_ecc", 1, "warn"),
        ("gpu_rows", 1, "warn"),
        ("xid", 1, "warn"),
        ("nvlink", 4, "ok"),
        ("nvlink", 5, "warn"),
        ("disk", 100, "ok"),
    ],
)
def test_each_check_says_what_a_rise_of_its_counters_means(check: str, growth: int, level: str) -> None:
    verdict = judge(entry(check, counter=10), entry(check, counter=10 + growth), CHECKS)
    assert verdict.level == level
    if level != "ok":
        assert f"rose since 2026-11-20T12:00:00+00:00: counter by {growth}; " in verdict.summary


def test_the_first_look_compares_with_nothing() -> None:
    assert judge(None, entry("infiniband", link_downed=9), CHECKS).level == "ok"


def test_every_check_that_counts_says_what_a_rise_means() -> None:
    assert {name for name, check in CHECKS.items() if check.rise} == {
        "gpu_ecc",
        "gpu_rows",
        "infiniband",
        "nvlink",
        "port_errors",
        "sxid",
        "xid",
    }


@pytest.mark.parametrize(
    ("counter", "growth", "hours", "level"),
    [
        ("mlx5_0:1 symbol_error", 9, 1, "ok"),
        ("mlx5_0:1 symbol_error", 10, 1, "warn"),
        ("mlx5_0:1 symbol_error", 10, 24, "ok"),
        ("mlx5_0:1 symbol_error", 240, 24, "warn"),
        ("mlx5_0:1 port_xmit_discards", 99, 1, "ok"),
        ("mlx5_0:1 port_xmit_discards", 100, 0, "warn"),
    ],
)
def test_errors_of_a_port_are_judged_by_how_many_an_hour(counter: str, growth: int, hours: int, level: str) -> None:
    later = CheckRecord(
        time=f"2026-11-{20 + (12 + hours) // 24}T{(12 + hours) % 24:02d}:00:00+00:00",
        verdict="ok",
        counters={"port_errors": {counter: 5 + growth}},
    )
    verdict = judge(entry("port_errors", **{counter: 5}), later, CHECKS)
    assert verdict.level == level


def test_one_recovery_of_a_link_matters_and_four_repeated_packets_do_not() -> None:
    before = entry("nvlink", **{"gpu0 replay": 0, "gpu0 recovery": 0})
    assert judge(before, entry("nvlink", **{"gpu0 replay": 4, "gpu0 recovery": 0}), CHECKS).level == "ok"
    assert judge(before, entry("nvlink", **{"gpu0 replay": 0, "gpu0 recovery": 1}), CHECKS).level == "warn"


def test_a_history_whose_time_cannot_be_read_still_counts() -> None:
    before = CheckRecord(time="yesterday", verdict="ok", counters={"port_errors": {"a symbol_error": 0}})
    assert judge(before, entry("port_errors", **{"a symbol_error": 10}), CHECKS).level == "warn"


def report(**counters: int) -> NodeReport:
    verdicts = {
        "disk": Verdict(level="warn", summary="", facts={"/": {"percent": 91.0}}),
        "xid": Verdict(level="ok", summary="", facts={"counters": counters}),
    }
    return NodeReport(host=Host(name="gpu01"), verdicts=verdicts, seconds=1.0)


def test_an_entry_holds_counters_and_the_verdict_and_nothing_else() -> None:
    assert entry_of(report(a=1), NOON) == CheckRecord(time=NOON.isoformat(), verdict="warn", counters={"xid": {"a": 1}})


def test_what_was_appended_comes_back_per_node(tmp_path: Path) -> None:
    past = History(tmp_path / "new" / "folder")
    assert past.last("gpu01") is None
    for value in (1, 2):
        past.append("gpu01", entry("xid", a=value))
    past.append("ops@[fe80::1]:22/../x", entry("xid", a=7))
    past.append("..", entry("xid", a=8))
    assert past.last("gpu01") == entry("xid", a=2)
    assert past.last("ops@[fe80::1]:22/../x") == entry("xid", a=7)
    assert past.last("..") == entry("xid", a=8)
    assert {path.parent for path in tmp_path.rglob("*.jsonl")} == {tmp_path / "new" / "folder"}


@pytest.mark.parametrize(
    "torn",
    [
        '{"time": "2026',
        '{"time": 1}\n',
        "[]\n",
        '{"time": "x", "verdict": "ok", "counters": {"a": {"b": "c"}}}\n',
        "\xff\n",
    ],
)
def test_a_torn_line_is_passed_over(tmp_path: Path, torn: str) -> None:
    past = History(tmp_path)
    past.append("gpu01", entry("xid", a=1))
    with open(tmp_path / "gpu01.jsonl", "a", encoding="latin-1") as file:
        file.write(torn)
    assert past.last("gpu01") == entry("xid", a=1)


def test_a_node_after_a_torn_line_is_still_remembered(tmp_path: Path) -> None:
    past = History(tmp_path)
    (tmp_path / "gpu01.jsonl").write_text('{"time": "2026')
    past.append("gpu01", entry("xid", a=2))
    assert past.last("gpu01") == entry("xid", a=2)


def test_a_file_that_grew_too_long_keeps_its_newer_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MAX_LINES", 10)
    past = History(tmp_path)
    for value in range(25):
        past.append("gpu01", entry("xid", a=value))
    lines = (tmp_path / "gpu01.jsonl").read_text().splitlines()
    assert 5 <= len(lines) <= 10
    assert [json.loads(line)["counters"]["xid"]["a"] for line in lines] == list(range(25 - len(lines), 25))
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".part"] == []


def test_programs_side_by_side_lose_no_line(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda value: History(tmp_path).append("gpu01", entry("xid", a=value)), range(40)))
    lines = (tmp_path / "gpu01.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["counters"]["xid"]["a"] for line in lines) == list(range(40))

"""The means by which other tests wait, and by which they leave cases to `make test-all`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests import patience
from tests.patience import running, scaled, slowness, wait_for_end, wait_until
from tests.slow import combinations, slow


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch):
    """Sets what is timed, and forgets what was measured before."""

    def set_work(program: str) -> None:
        monkeypatch.setattr(patience, "_measured", None)
        monkeypatch.setattr(patience, "_WORK", program)

    return set_work


@pytest.mark.slow
def test_a_machine_that_takes_longer_for_the_same_work_is_slower(work) -> None:
    # An interpreter starts in less than the seconds of the idle machine, or this one is slow and is measured as such.
    work(f"import time; time.sleep({20 * patience._IDLE_SECONDS})")
    assert slowness() >= 20
    assert scaled(1.0) >= 20
    assert scaled(1.0).is_integer()


def test_a_deadline_never_shrinks(work, monkeypatch) -> None:
    work("")
    monkeypatch.setattr(patience, "_IDLE_SECONDS", 1e6)
    assert slowness() == 1
    assert scaled(0.5) == 0.5


def test_a_measurement_is_used_again_while_it_is_fresh(work, monkeypatch) -> None:
    work("")
    first = slowness()
    monkeypatch.setattr(patience, "_WORK", "raise SystemExit(1)")
    assert slowness() == first
    monkeypatch.setattr(patience, "_FRESH_SECONDS", -1.0)
    with pytest.raises(subprocess.CalledProcessError):
        slowness()


def test_waiting_ends_with_the_event_or_with_the_complaint() -> None:
    looks: list[int] = []
    wait_until(lambda: looks.append(1) or len(looks) == 3, "three looks were not enough")
    assert len(looks) == 3
    with pytest.raises(AssertionError, match=r"it never comes, after \d+ s"):
        wait_until(lambda: False, "it never comes", seconds=0.01)


def test_a_zombie_does_not_run() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        assert running(child.pid)
        os.kill(child.pid, signal.SIGKILL)  # nothing takes its status yet
        wait_for_end([child.pid])
    finally:
        child.kill()
        child.wait()
    assert not running(child.pid)


def cases_of(mark: pytest.MarkDecorator) -> dict[tuple[object, ...], bool]:
    """Whether each case is quick."""
    names, cases = mark.args
    assert names == "ranks, nodes, layout, exchange"
    return {tuple(case.values): not case.marks for case in cases}


def test_the_quick_ones_of_all_combinations_hold_every_value() -> None:
    sizes, layouts, exchanges = [(1, 1), (2, 1), (4, 2)], ["zigzag", "striped"], ["relay", "direct"]
    cases = cases_of(combinations({"ranks, nodes": sizes, "layout": layouts, "exchange": exchanges}))
    assert len(cases) == 3 * 2 * 2
    quick = [case for case, is_quick in cases.items() if is_quick]
    assert len(quick) == 3
    assert {case[:2] for case in quick} == set(sizes)
    assert {case[2] for case in quick} == set(layouts)
    assert {case[3] for case in quick} == set(exchanges)


def test_slow_cases_are_marked_so() -> None:
    one, two = slow(3, (4, 2))
    assert (one.values, two.values) == ((3,), (4, 2))
    assert [mark.name for mark in (*one.marks, *two.marks)] == ["slow", "slow"]

"""The figure of speed against memory: whose trials make the line, and which points stand beside it."""

from __future__ import annotations

from harness.report.figures.speed_memory import FIGURE
from harness.report.results import Row, rows_of
from tests.harness.synthetic_records import GIB, H200, LARGE, record


def row(memory: float, seconds: float, method: str = "burst", seq_len: int = 1024, plan: str = "hand") -> Row:
    made = record(gpu=H200, model=LARGE, dtype="bf16", method=method, seconds=seconds, seq_len=seq_len)
    assert made.measurement is not None
    made.measurement.peak_allocated_bytes = [int(memory * GIB)]
    [one] = rows_of([made])
    return {**one, "checkpoint.plan": plan}


ROWS = [row(10, 2.0), row(20, 1.0, plan="auto"), row(15, 3.0), row(12, 1.5, "ring"), row(16, 1.6, "ring")]


def test_the_line_joins_what_no_other_trial_of_the_engine_beats() -> None:
    assert FIGURE.applies(ROWS)
    [ax] = FIGURE.draw(ROWS).axes
    line, *points = ax.get_lines()
    assert list(line.get_xdata()) == [10, 20]
    assert line.get_ydata()[0] < line.get_ydata()[1]
    filled, hollow, others = points
    assert (list(filled.get_xdata()), list(hollow.get_xdata())) == ([20], [10])
    assert hollow.get_markerfacecolor() == "white" != filled.get_markerfacecolor()
    assert list(others.get_xdata()) == [12]  # the other one needs more memory and is slower


def test_every_length_has_a_panel() -> None:
    rows = ROWS + [row(20 + extra, 2.0 - extra, seq_len=2048) for extra in (0, 1)]
    assert [ax.get_title(loc="left") or ax.get_title() for ax in FIGURE.draw(rows).axes] == ["1k tokens", "2k tokens"]


def test_it_is_drawn_only_where_there_is_a_frontier_and_something_beside_it() -> None:
    assert not FIGURE.applies([each for each in ROWS if each["method"] == "ring"])
    assert not FIGURE.applies(
        [each for each in ROWS if each["method"] == "burst" and each["checkpoint.plan"] == "hand"]
    )
    assert not FIGURE.applies([{**each, "task": "attention"} for each in ROWS])

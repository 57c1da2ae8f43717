"""The figure of speed against memory: what makes its line, what stands beside it, and what its title claims."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from engine.settings import Checkpoint
from harness.report.drawing.sheet import Sheet
from harness.report.figures import shown_of
from harness.report.figures.speed_memory import FIGURES
from harness.report.results import Row, rows_of
from tests.harness.report.figures.drawn import texts, tips
from tests.harness.synthetic_records import GIB, H200, LARGE, around, levers, record

FIGURE = FIGURES["speed_memory"]
SYSTEMS = {"torchtitan_upstream": "torchtitan", "trl_upstream": "TRL + Liger-Kernel"}


def row(memory: float, seconds: float, method: str = "burst", budget: str | None = None, **changes: Any) -> Row:
    """A trial in three rounds; with a `budget`, one that was planned for it (an empty one: for all of the GPU)."""
    if budget is not None:
        changes |= {"memory": budget, "checkpoint": Checkpoint(plan="auto")}
    made = record(gpu=H200, model=LARGE, dtype="bf16", method=method, rounds=around(seconds), seq_len=131072, **changes)
    if made.measurement is not None:
        made.measurement.peak_allocated_bytes = [int(memory * GIB)]
    [one] = rows_of([replace(made, system=SYSTEMS.get(method, method))])
    return one


BURST = [row(20, 1.0, budget="24GiB"), row(38, 0.95, budget="40GiB"), row(125, 0.9, budget="")]
OTHERS = [row(98, 1.07, "torchtitan_upstream"), row(44, 1.4, "trl_upstream")]


def sheet(rows: list[Row]) -> Sheet:
    found = FIGURE.draw(rows)
    assert found is not None
    return found


def test_budgets_are_one_line_with_labels_and_other_systems_are_named_points() -> None:
    found = sheet([*BURST, *OTHERS])
    assert {"burst in 24 GiB", "40 GiB", "all of the GPU", "torchtitan", "TRL + Liger"} <= set(texts(found))
    assert len(tips(found)) == 5
    assert any(tip.startswith("torchtitan: 122,000 (") and tip.endswith("tokens/s, 98.0 GiB") for tip in tips(found))
    assert found.about.startswith("1B model, one sequence of 128K tokens, causal mask, bf16, one H200")
    assert "in 3 rounds" in found.note
    assert "Measured 2026-01-02." in found.note


def test_the_title_is_what_the_least_memory_buys_that_is_still_faster() -> None:
    assert sheet([*BURST, *OTHERS]).title == "7% faster than torchtitan, in a fifth of its memory"


@pytest.mark.parametrize(
    ("own", "title"),
    [
        ((49.0, 1.0), "7% faster than torchtitan, in half of its memory"),
        ((30.0, 1.0), "7% faster than torchtitan, in 31% of its memory"),
        ((99.0, 1.0), "7% faster than torchtitan, in the same memory"),
        ((49.0, 1.07), "As fast as torchtitan, in half of its memory"),
        ((49.0, 1.2), "11% slower than torchtitan, in half of its memory"),
        ((196.0, 1.0), "7% faster than torchtitan, in 2.0 times its memory"),
    ],
)
def test_speed_and_share_of_memory_are_said_as_they_are(own: tuple[float, float], title: str) -> None:
    """The second configuration of burst, which the figure needs, is slower and larger."""
    assert sheet([row(*own, budget="24GiB"), row(210, 2.0, budget=""), *OTHERS]).title == title


def test_where_kernels_differ_the_ratio_with_the_same_kernel_stands_in_the_note() -> None:
    theirs = [{**OTHERS[0], "chosen_kernel": "torch: cudnn, else flash, else math"}, OTHERS[1]]
    alike = {**row(125, 1.0, budget="", kernel="cudnn"), "chosen_kernel": "cudnn"}
    found = sheet([*BURST, alike, *theirs])
    assert found.title == "7% faster than torchtitan, in a fifth of its memory, FlashAttention-4 beside cuDNN"
    assert "With cuDNN in both, burst in 125 GiB is 1.070 times as fast as torchtitan." in found.note.replace(
        "1.070 to 1.070", "1.07"
    )
    assert "burst with cuDNN" in texts(found)
    without = sheet([*BURST, *theirs])
    assert "burst and torchtitan attend with different kernels" in without.note
    assert "kernels" not in sheet([*BURST, *OTHERS]).note


def test_each_setting_of_a_system_is_a_point_and_the_title_names_the_fastest() -> None:
    slower = [
        row(30 + 4 * place, 1.5 - 0.03 * place, "torchtitan_upstream", checkpoint=Checkpoint(upstream=f"every {place}"))
        for place in range(1, 13)
    ]
    found = sheet([*BURST, *OTHERS, *slower])
    assert found.title == "7% faster than torchtitan, in a fifth of its memory"
    assert len(tips(found)) == 17
    assert {"torchtitan", *(f"torchtitan, every {place}" for place in range(1, 13))} <= set(texts(found))
    assert "Pooled" not in found.note
    more = [
        row(200 + place, 2.0 + place, "torchtitan_upstream", checkpoint=Checkpoint(upstream=f"every {place}"))
        for place in range(13, 40)
    ]
    many = sheet([*more, *slower, *OTHERS, *BURST])
    assert (many.title, len(tips(many))) == (found.title, 17)
    fastest = row(99, 0.91, "torchtitan_upstream", checkpoint=Checkpoint(upstream="offload"))
    beside = sheet([*more, *slower, *OTHERS, *BURST, fastest]).title
    assert beside == "1% faster than torchtitan, offload, in 1.3 times its memory"


def test_a_budget_of_all_that_the_gpu_has_reads_so() -> None:
    assert "all of the GPU" in texts(sheet([*BURST[:2], row(125, 0.9, budget="139GiB"), *OTHERS]))


def test_what_was_set_by_hand_stands_beside_the_budget() -> None:
    by_hand = {"gradient_offload": True, "optimizer_offload": True}
    drawn = texts(sheet([row(17, 1.0, budget="18.5GiB", **by_hand), *BURST[1:], *OTHERS]))
    assert any(text.startswith("burst in 18.5 GiB, ") and "gradient_offload on" in text for text in drawn)
    assert {"40 GiB", "all of the GPU"} <= set(drawn)


def test_trials_of_two_runs_are_never_compared_in_the_title() -> None:
    elsewhere = [{**one, "run": "another"} for one in OTHERS]
    assert "torchtitan" not in sheet([*BURST, *elsewhere]).title
    assert sheet([*BURST, *elsewhere]).title == "burst: in 20.0 GiB 10% slower than in 125 GiB"


def test_a_system_that_is_missing_or_out_of_memory_leaves_the_rest() -> None:
    lost = row(0, 0, "torchtitan_upstream", status="oom")
    found = sheet([*BURST, lost, OTHERS[1]])
    assert "Without a point: torchtitan (oom)." in found.note
    assert found.title == "40% faster than TRL + Liger, in 45% of its memory"
    assert sheet([*BURST[:2], OTHERS[1]]).title.endswith("TRL + Liger, in 45% of its memory")


def test_of_trials_set_by_hand_the_line_joins_those_that_no_other_beats() -> None:
    found = sheet([{**one, "seq_len": 131072} for one in rows_of(levers())])
    assert {"offload all", "mlp_tiles 8"} <= {text.partition(", ")[0] for text in texts(found)} or len(tips(found)) == 4
    assert found.title.startswith("burst: ")


def test_it_is_drawn_only_where_burst_has_a_choice_and_then_no_other_figure_repeats_it() -> None:
    assert FIGURE.draw([BURST[0], *OTHERS]) is None
    assert FIGURE.draw([{**one, "task": "attention"} for one in [*BURST, *OTHERS]]) is None
    assert not {"speed", "memory"} & set(shown_of([*BURST, *OTHERS]))
    longer = [{**one, "seq_len": 262144} for one in BURST]
    assert list(shown_of([*BURST, *OTHERS, *longer]))[:2] == ["speed", "speed_memory"]

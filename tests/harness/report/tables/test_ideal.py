"""How near attention comes to the ideal, to its reference and to the bound of its link, from records of one run."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from engine.attention.problem import RING_SCHEDULES, ULYSSES_SCHEDULES
from harness.records.record import Record, Round
from harness.records.stored import read_records, runs_below
from harness.report.results import row_of, rows_of
from harness.report.tables.ideal import ideal_table, spanning_trial
from tests.harness.synthetic_records import GIB, H200, LARGE, record
from tests.published import PUBLISHED


def attention(seconds: float, **changes: object) -> Record:
    """A trial whose one measured step takes `seconds`, a third of it forward."""
    trial = record(task="attention", model=LARGE, dtype="bf16", gpu=H200, seq_len=1 << 17, **changes)
    assert trial.measurement is not None
    trial.measurement.step_seconds = [seconds]
    trial.measurement.forward_seconds = [seconds / 3]
    return trial


def test_the_share_of_the_ideal_is_the_time_alone_over_ranks_and_time_together() -> None:
    table = ideal_table(
        rows_of([attention(0.4), attention(0.125, cp_size=4), attention(0.2, cp_size=4, method="ring")])
    )
    assert table is not None
    headers = [column.header for column in table.columns]
    assert not [header for header in headers if "link" in header or "reference" in header]  # one node: no slow link
    assert "link" not in table.note
    shares = {row[0]: row[headers.index("% of ideal")] for row in table.rows}
    assert shares == {"burst": pytest.approx(0.8), "ring": pytest.approx(0.5)}


def test_the_whole_problem_on_every_gpu_at_once_is_what_they_reach_together() -> None:
    trials = [attention(0.4), attention(0.42, world_size=4), attention(0.125, cp_size=4)]
    table = ideal_table(rows_of(trials))
    assert table is not None
    [row] = table.rows  # what is not shared is judged by nothing
    found = dict(zip([column.header for column in table.columns], row, strict=True))
    assert found["% of ideal"] == pytest.approx(0.8)
    assert found["at once ms"] == pytest.approx(105)
    assert found["% of at once"] == pytest.approx(0.84)
    assert ideal_table(rows_of(trials[1:])) is None


def test_another_length_mask_or_kernel_is_not_the_ideal_of_a_trial() -> None:
    shared = attention(0.125, cp_size=4)
    for changes in ({"mask": "full"}, {"kernel": "cudnn"}, {"batch_size": 2}):
        assert ideal_table(rows_of([attention(0.4, **changes), shared])) is None


def by_kernel(kernel: str, seconds: float, **changes: object) -> Record:
    trial = attention(seconds, **changes)
    assert trial.measurement is not None
    trial.measurement.chosen["kernel"] = kernel
    return trial


def test_a_compared_system_is_beside_the_ideal_of_its_kernel_and_without_one_beside_that_of_the_engines() -> None:
    alone = by_kernel("fa4", 0.4)
    theirs = by_kernel("cudnn", 0.2, cp_size=4, method="transformer_engine_upstream")
    table = ideal_table(rows_of([alone, by_kernel("cudnn", 0.2, cp_size=4), theirs]))
    assert table is not None
    [row] = table.rows  # the engine's own trial of another kernel has no ideal
    assert (row[0], row[-1]) == ("transformer_engine_upstream", pytest.approx(0.5))
    assert "beside the ideal of the engine's kernel" in table.note
    table = ideal_table(rows_of([alone, by_kernel("cudnn", 0.48), theirs]))
    assert table is not None
    assert [row[-1] for row in table.rows] == [pytest.approx(0.6)]
    assert "engine's kernel" not in table.note


def test_ranks_that_share_a_cpu_have_no_ideal() -> None:
    assert ideal_table(rows_of([record(task="attention"), record(task="attention", cp_size=2)])) is None


LINK = {"before": 0.5, "between": 1.0, "after": 0.8}
Q = 1 / 8  # GiB of Q on a rank: 32K x 16 x 128 x 2 bytes; of K and V half of that each


def over_two_nodes(seconds: float, link: dict[str, float] | float | None = None, **changes: Any) -> Record:
    """Four ranks on two nodes; the schedule that ran is a double ring. A float is a link measured once, at the end."""
    trial = attention(seconds, **{"cp_size": 4, "emulate_nodes": 2, "mask": "full"} | changes)
    assert trial.measurement is not None
    trial.measurement.chosen["schedule"] = "double_ring"
    if isinstance(link, dict):
        trial.measurement.extra["link_gib_per_second"] = link
        trial.measurement.extra["across_gib_per_second"] = link["after"]
    elif link:
        trial.measurement.extra["across_gib_per_second"] = link
    return trial


def shown(*trials: Record) -> dict[str, Any]:
    """The only line of the table, by header; the ideal takes 0.1 s on four ranks."""
    table = ideal_table(rows_of([attention(0.4, mask="full"), *trials]))
    assert table is not None
    [row] = table.rows
    return dict(zip([column.header for column in table.columns], row, strict=True))


def test_across_a_slow_link_the_bound_is_what_the_fastest_measurement_lets_through() -> None:
    found = shown(over_two_nodes(2.0, LINK))
    # K and V to the other node; in backward, the side of K and V with its gradients.
    needed = Q + 2 * Q
    assert found["needed GiB"] == pytest.approx(needed)
    assert (found["link GiB/s"], found["link measured"]) == (1.0, "3 times, fastest between")
    assert found["link spread %"] == pytest.approx(0.5)
    assert found["link bound ms"] == pytest.approx(1e3 * needed)
    assert found["% of link bound"] == pytest.approx(needed / 2.0)
    # Compute of the ideal in each pass, unless the link takes longer: here it does in both.
    assert found["reference ms"] == pytest.approx(1e3 * needed)
    fast = shown(over_two_nodes(2.0, dict.fromkeys(LINK, 100.0)))
    assert fast["reference ms"] == pytest.approx(fast["ideal ms"])
    assert fast["link bound ms"] < fast["ideal ms"]


def test_every_schedule_is_stated_with_what_it_needs() -> None:
    [half, more] = shown(over_two_nodes(2.0, LINK))["needed by schedule, GiB"].split("; ")[:2]
    assert half == "double ring, usp 0.12 + 0.25"  # K and V; then K, V and their gradients
    assert more == "ulysses, usp transposed 0.19 + 0.19"  # half of Q, K, V and O; half of their gradients


def test_a_link_measured_once_gives_a_reference_and_no_bound() -> None:
    found = shown(over_two_nodes(2.0, 1.0))
    assert found["link measured"] == "once, after the steps"
    assert found["% of reference"] == pytest.approx(3 * Q / 2.0)
    assert not {"link bound ms", "% of link bound", "link spread %"} & found.keys()


def test_a_step_that_was_faster_than_every_measurement_raises_the_link_and_not_its_share() -> None:
    slow = dict.fromkeys(LINK, 0.1)  # 3.75 s for what the step sent in 2 s
    found = shown(over_two_nodes(2.0, slow))
    assert found["link measured"] == "3 times; its own steps were faster"
    assert found["link GiB/s"] == pytest.approx(3 * Q / 2.0)
    assert found["% of link bound"] == pytest.approx(1.0)
    once = shown(over_two_nodes(2.0, 0.1))
    assert (once["link measured"], once["% of reference"]) == ("once; its own steps were faster", pytest.approx(1.0))


def test_the_bytes_that_a_record_counts_are_those_its_steps_sent() -> None:
    trial = over_two_nodes(2.0, dict.fromkeys(LINK, 0.1))
    assert trial.measurement is not None
    trial.measurement.extra["computed_sent_between_nodes_bytes"] = [GIB, GIB, GIB // 2, GIB // 2]
    found = shown(trial)
    assert found["link GiB/s"] == pytest.approx(0.5)  # of the node that sends most
    assert found["% of link bound"] == pytest.approx(3 * Q)


def test_what_sends_fewer_bytes_than_are_needed_or_unknown_ones_has_a_reference_and_no_bound() -> None:
    fewer, unknown = over_two_nodes(2.0, LINK), over_two_nodes(2.0, LINK)
    assert fewer.measurement is not None
    assert unknown.measurement is not None
    fewer.measurement.extra["computed_sent_between_nodes_bytes"] = [1024] * 4
    unknown.measurement.chosen["schedule"] = "a schedule of another system"
    for trial in (fewer, unknown):
        found = shown(trial)
        assert "% of link bound" not in found
        assert found["% of reference"] is not None


def test_a_window_needs_less_between_nodes_than_a_causal_mask() -> None:
    def needed(mask: str) -> float:
        trial = over_two_nodes(2.0, LINK, mask=mask)
        assert trial.measurement is not None
        trial.measurement.chosen["layout"] = "contiguous"
        found = spanning_trial(row_of(trial))
        assert found is not None
        return found.needed / GIB

    assert 0 < needed("sliding_window:1024") < needed("causal") / 20
    assert needed("causal") < needed("full")


def test_no_trial_of_the_engines_schedules_passes_its_bound_whatever_its_link_and_its_steps() -> None:
    chance = random.Random(0)
    schedules, masks = RING_SCHEDULES + ULYSSES_SCHEDULES, ("full", "causal", "sliding_window:4096")
    layouts = ("contiguous", "zigzag")
    for schedule, mask, layout, rounds in itertools.product(schedules, masks, layouts, (0, 2)):
        trial = over_two_nodes(1.0, {moment: 10 ** chance.uniform(-3, 3) for moment in LINK}, mask=mask)
        assert trial.measurement is not None
        trial.measurement.chosen |= {"schedule": schedule, "layout": layout}
        trial.measurement.step_seconds = [10 ** chance.uniform(-4, 2) for _ in range(5)]
        trial.rounds = [
            Round(number=number, place=1, started_at="", wall_seconds=1.0, step_seconds=[10 ** chance.uniform(-4, 2)])
            for number in range(rounds)
        ]
        row = row_of(trial)
        found = spanning_trial(row)
        assert found is not None
        assert found.bounded
        steps = [seconds for steps in row["step_seconds_by_round"] for seconds in steps]
        assert found.seconds(found.needed) <= min(steps) * (1 + 1e-12)


def in_rounds(*rounds: tuple[dict[str, float], list[float]]) -> Record:
    """A trial over two nodes with the link and the steps of each round."""
    trial = over_two_nodes(1.0, rounds[-1][0])
    assert trial.measurement is not None
    trial.measurement.step_seconds = [seconds for _, steps in rounds for seconds in steps]
    trial.rounds = [
        Round(
            number=number, place=1, started_at="", wall_seconds=9.0, step_seconds=steps, link_gib_per_second=link,
        )
        for number, (link, steps) in enumerate(rounds, start=1)
    ]  # fmt: skip
    return trial


def test_steps_are_judged_by_the_link_of_their_own_round() -> None:
    fast, slow = dict.fromkeys(LINK, 2.0), dict.fromkeys(LINK, 0.5)
    found = shown(in_rounds((fast, [0.5, 0.6]), (slow, [1.0, 1.1, 1.2])))
    assert found["link GiB/s"] == pytest.approx(0.5)  # of three of five steps
    assert found["% of link bound"] == pytest.approx(3 * Q / 0.5 / 1.0)
    assert found["link measured"] == "3 times in each of 2 rounds, fastest before"
    assert found["link spread %"] == pytest.approx(0.75)
    # The fastest of all rounds would have given a bound that the slow rounds' link cannot reach.
    last_alone = in_rounds(({}, [1.0, 1.1, 1.2]), (fast, [0.5, 0.6]))
    assert shown(last_alone)["link GiB/s"] == pytest.approx(2.0)


def test_no_median_of_rounds_passes_the_median_of_what_their_links_allow() -> None:
    chance = random.Random(1)
    for _ in range(50):
        rounds = [
            (
                {moment: 10 ** chance.uniform(-2, 2) for moment in LINK},
                [10 ** chance.uniform(-3, 2) for _ in range(chance.randint(1, 4))],
            )
            for _ in range(chance.randint(1, 4))
        ]
        row = row_of(in_rounds(*rounds))
        found = spanning_trial(row)
        assert found is not None
        assert found.bounded
        assert found.seconds(found.needed) <= row["step_seconds_median"] * (1 + 1e-12)


@pytest.mark.parametrize(
    "changes", [{"emulate_nodes": 1}, {"emulate_nodes": 2, "world_size": 8, "cp_size": 4}, {"emulate_nodes": 3}]
)
def test_ranks_of_one_node_or_of_unequal_ones_have_no_link(changes) -> None:
    assert spanning_trial(row_of(over_two_nodes(2.0, LINK, **changes))) is None


def test_a_trial_that_measured_no_link_has_neither_bound_nor_reference() -> None:
    assert spanning_trial(row_of(over_two_nodes(2.0))) is None


def test_the_published_records_show_no_share_of_a_bound_above_one() -> None:
    links = 0
    for run in runs_below(PUBLISHED):
        for row in rows_of(read_records(run)):
            found = spanning_trial(row) if row["task"] == "attention" and row["status"] == "ok" else None
            if found is not None:
                links += 1
                assert not found.bounded or found.seconds(found.needed) <= row["step_seconds_median"]
    assert links

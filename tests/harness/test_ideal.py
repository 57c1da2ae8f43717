"""How near attention comes to the ideal and to the bound of its link, from records of one run."""

from __future__ import annotations

import pytest

from engine.attention.planning.cost_model import Workload, link_bound_seconds
from harness.records.record import Record
from harness.report.ideal import ideal_table
from harness.report.results import rows_of
from tests.harness.synthetic_records import GIB, H200, LARGE, record


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
    assert "% of bound" not in headers  # one node: there is no slow link
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


def test_ranks_that_share_a_cpu_have_no_ideal() -> None:
    assert ideal_table(rows_of([record(task="attention"), record(task="attention", cp_size=2)])) is None


def test_across_a_slow_link_the_bound_is_what_the_link_lets_through() -> None:
    shared = attention(2.0, cp_size=4, emulate_nodes=2)
    assert shared.measurement is not None
    shared.measurement.extra["across_gib_per_second"] = 1.0
    table = ideal_table(rows_of([attention(0.4), shared]))
    assert table is not None
    [row] = table.rows
    # Of Q a rank holds 32K x 16 x 128 x 2 bytes = 1/8 GiB, of K and V half of that each. K and V to the other node take
    # 1/8 s forward; backward, the side of K and V with its gradients 1/4 s.
    assert row[-2:] == (1.0, pytest.approx((1 / 8 + 1 / 4) / 2.0))


def share(kv_heads: int, nodes: int) -> Workload:
    return Workload(
        cp_size=2 * nodes, node_size=2, heads=32, kv_heads=kv_heads, query_bytes=GIB, gradient_factor=1.0,
        forward_flops=0.0, rows=1 << 17,
    )  # fmt: skip


def test_the_bound_takes_the_schedule_that_sends_least() -> None:
    # Equal heads, two nodes: a ring sends 2 + 3 GiB, an exchange of heads 2 + 2.
    assert link_bound_seconds(share(32, 2), 0.0, 0.0, 1.0) == pytest.approx(4.0)
    # Eight KV heads: a ring 0.5 + 1, an exchange 1.25 + 1.25.
    assert link_bound_seconds(share(8, 2), 0.0, 0.0, 1.0) == pytest.approx(1.5)
    # Seven nodes and 32 heads, which do not divide: a ring is all there is.
    assert link_bound_seconds(share(32, 7), 0.0, 0.0, 1.0) == pytest.approx(6 * 2 + 6 * 3)


def test_compute_that_outlasts_the_transfers_is_the_bound() -> None:
    assert link_bound_seconds(share(32, 2), 10.0, 20.0, 1.0) == 30.0

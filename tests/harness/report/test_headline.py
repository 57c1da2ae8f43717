"""The first screen of a report: who is faster, by how much, how sure; on CPUs whether the methods agree."""

from __future__ import annotations

import pytest

from engine.settings import Checkpoint
from harness.records.record import Record
from harness.report.digits import MeasuredNumber
from harness.report.headline import TOO_FEW_ROUNDS, headline_of
from harness.report.html import Axis, Dots, RatioRow, dots_of, ratio_dots
from harness.report.rankings import SizeRanking, rankings_of, sizes_table, verdict_sentence
from harness.report.results import rows_of
from harness.report.tables.trials import CPU_TIMES
from tests.harness.report.tables.test_report_tables import as_dicts
from tests.harness.synthetic_records import H200, LARGE, around, cpu_sweep, gpu_sweep, record, with_memory

NOISY = ([[1.00, 1.01], [1.04, 1.05], [0.98, 0.99]], [[1.02, 1.03], [0.99, 1.00], [1.04, 1.05]])


def on_gpu(**changes: object) -> Record:
    return record(**{"gpu": H200, "dtype": "bf16", "model": LARGE, "seq_len": 1 << 20, "cp_size": 4} | changes)  # type: ignore[arg-type]


def first(*trials: Record, baseline: str | None = None) -> SizeRanking:
    return rankings_of(rows_of(trials), baseline)[0]


def plot(*trials: Record) -> Dots:
    made = dots_of(first(*trials))
    assert made is not None
    return made


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        ({"rounds": around(1.0)}, {"rounds": around(1.5)},
         "burst is 1.500 times as fast as ring (1.500 to 1.500, 3 rounds)."),
        ({"rounds": around(1.5)}, {"rounds": around(1.0)},
         "burst is slower than ring: 0.6667 times as fast (0.6667 to 0.6667, 3 rounds)."),
        ({"rounds": [[0.2], [0.1]]}, {"rounds": [[0.3], [0.2]]},
         "burst is 1.7 times as fast as ring (1.5 and 2.0 in two rounds)."),
        ({"seconds": 1.0}, {"seconds": 1.5},
         "burst ran 1.50 times as fast as ring in one round, which cannot tell a difference from noise."),
    ],
)  # fmt: skip
def test_the_verdict_is_one_sentence_with_ratio_interval_and_rounds(ours, theirs, verdict) -> None:
    assert verdict_sentence(first(on_gpu(**ours), on_gpu(method="ring", **theirs))) == verdict


def test_within_the_noise_nobody_is_faster() -> None:
    told = verdict_sentence(first(on_gpu(rounds=NOISY[0]), on_gpu(method="ring", rounds=NOISY[1])))
    assert told.startswith("burst and ring are not distinguishable: ")
    assert "times as fast" in told


def test_ours_is_beside_the_fastest_other_method_and_a_baseline_takes_its_place() -> None:
    times = {"burst": 2.0, "ring": 4.0, "ulysses": 1.0}
    trials = [on_gpu(method=method, rounds=around(seconds)) for method, seconds in times.items()]
    assert [series.name for series in first(*trials).compared] == ["ulysses", "burst", "ring"]
    assert (first(*trials).subject.name, first(*trials).other.name) == ("burst", "ulysses")
    assert "burst is 2.000 times as fast as ring" in verdict_sentence(first(*trials, baseline="ring"))


def test_ours_is_never_beside_itself_where_other_methods_ran() -> None:
    ours = [on_gpu(mlp_tiles=tiles, rounds=around(seconds)) for tiles, seconds in ((1, 1.0), (8, 1.1))]
    ranking = first(*ours, on_gpu(method="ring", rounds=around(1.5)))
    assert ranking.other.method == "ring"
    dots = dots_of(ranking)
    assert [row.verdict.partition(";")[0] for row in dots.rows] == ["", "", "slower"]


def test_methods_are_told_apart_under_one_value_of_settings_where_both_ran_with_it() -> None:
    trials = [on_gpu(settings="equal", rounds=around(1.0)), on_gpu(settings="as_published", rounds=around(2.0)),
              on_gpu(method="ring", settings="as_published", rounds=around(3.0)),
              on_gpu(method="ulysses", settings="tuned", rounds=around(2.5))]  # fmt: skip
    told = verdict_sentence(first(*trials))
    assert told.startswith("burst, as published is 1.500 times as fast as ring, as published")
    assert verdict_sentence(first(trials[0], trials[2])).startswith("burst, equal settings is 3.000 times as fast as")


def test_settings_of_one_method_are_named_by_what_differs() -> None:
    trials = [on_gpu(checkpoint=Checkpoint(tail=tail), rounds=around(seconds))
              for tail, seconds in ((0.0, 2.0), (0.5, 1.5), (1.0, 1.0))]  # fmt: skip
    assert verdict_sentence(first(*trials)).startswith("burst with tail 1.0 is 1.500 times as fast as tail 0.5")
    assert [row.name for row in plot(*trials).rows] == ["tail 1.0", "tail 0.5", "tail 0.0"]


def test_a_series_alone_is_told_with_its_speed_and_has_no_plot() -> None:
    ranking = first(on_gpu(rounds=[[300.0]]))
    assert verdict_sentence(ranking) == "burst ran at 874 tokens/s per GPU; nothing was measured beside it."
    assert dots_of(ranking) is None


def test_other_kernels_are_said_and_the_same_kernel_is_compared_where_it_ran() -> None:
    def kernel(one: Record, name: str) -> Record:
        one.measurement.chosen["kernel"] = name
        return one

    theirs = kernel(on_gpu(method="ring", rounds=around(1.5)), "cudnn")
    told = headline_of(rows_of([kernel(on_gpu(rounds=around(1.0)), "fa4"), theirs])).verdict
    assert told.endswith("Their attention kernels differ: FlashAttention-4 and cuDNN.")
    same = kernel(on_gpu(kernel="cudnn", rounds=around(1.4)), "cudnn")
    told = headline_of(rows_of([kernel(on_gpu(kernel="fa4", rounds=around(1.0)), "fa4"), theirs, same])).verdict
    assert "With cuDNN in both, 1.07" in told
    kernel(theirs, "torch: cudnn, else flash, else math")
    told = headline_of(rows_of([kernel(on_gpu(kernel="fa4", rounds=around(1.0)), "fa4"), theirs, same])).verdict
    assert "With cuDNN in both, 1.07" in told


def test_the_largest_contest_of_methods_comes_first_and_training_before_attention() -> None:
    trials = [on_gpu(method=method, seq_len=1 << power, task=task)
              for power in (18, 19) for task in ("attention", "train") for method in ("burst", "ring")]  # fmt: skip
    places = [ranking.place for ranking in rankings_of(rows_of([*trials, on_gpu()]))]
    assert places == [
        "Training 1b, 512k tokens, 4 × H200", "Training 1b, 256k tokens, 4 × H200",
        "Attention 1b, 512k tokens, 4 × H200", "Attention 1b, 256k tokens, 4 × H200",
        "Training 1b, 1M tokens, 4 × H200",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"mask": "sliding_window:4095", "dtype": "fp32", "emulate_nodes": 2, "batch_size": 2},
         "Training 1b, fp32, 2 × 1M tokens, mask sliding_window:4095, 4 × H200 on 2 emulated nodes"),
        ({"cp_size": 2, "world_size": 4}, "Training 1b, 2 × 1M tokens, CP 2, 4 ranks, 4 × H200"),
    ],
)  # fmt: skip
def test_a_place_says_what_is_not_usual(changes, place) -> None:
    assert first(on_gpu(**changes)).place == place


def test_sizes_batches_and_nodes_are_never_mixed() -> None:
    others = [{"seq_len": 4096}, {"cp_size": 2}, {"batch_size": 2}, {"emulate_nodes": 2}, {"mask": "full"}]
    rows = rows_of([on_gpu(), *(on_gpu(method="ring", **changes) for changes in others)])
    assert not any(ranking.of_methods for ranking in rankings_of(rows))
    both = [*rows_of([on_gpu()], run="a"), *rows_of([on_gpu(method="ring")], run="b")]
    assert len(rankings_of(both)) == 2


def test_every_other_size_has_its_line_with_ratio_and_verdict() -> None:
    trials = [on_gpu(method=method, seq_len=1 << power, rounds=around(seconds)) for power in (16, 18)
              for method, seconds in (("burst", 1.0), ("ring", 1.5))]  # fmt: skip
    lines = as_dicts(sizes_table(rankings_of(rows_of([*trials, on_gpu(seq_len=4096)]))))
    assert [line["set-up"].split(", ")[1] for line in lines] == ["256k tokens", "64k tokens", "4k tokens"]
    assert [line["verdict"] for line in lines] == ["faster", "faster", "alone"]
    assert lines[0]["times as fast"] == pytest.approx(1.5)


def test_the_plot_is_sorted_and_says_speed_memory_verdict_and_what_was_lost() -> None:
    trials = [with_memory(20, 1.5, model=LARGE, rounds=around(1.5), method="ring"),
              with_memory(30, 1.0, model=LARGE, rounds=around(1.0)),
              on_gpu(seq_len=1024, cp_size=1, method="ulysses", status="oom")]  # fmt: skip
    made = plot(*trials)
    assert [row.name for row in made.rows] == ["burst", "ring", "ulysses"]
    assert [row.kind for row in made.rows] == ["subject", "slower", "lost"]
    assert made.headers[-1] == "against burst"
    assert [row.cells[-1] for row in made.rows[:2]] == ["30.0", "20.0"]
    assert made.rows[1].verdict == "slower; burst 1.500× (1.500 to 1.500)"
    assert made.rows[2].cells[0] == "oom"
    assert made.rows[0].at > made.rows[1].at
    assert made.rows[0].low <= made.rows[0].at <= made.rows[0].high


def test_an_axis_has_round_ticks_inside_its_ends() -> None:
    axis = Axis([MeasuredNumber(10786.0), MeasuredNumber(17023.0)])
    assert [text for _, text in axis.ticks()] == ["12,000", "14,000", "16,000"]
    assert all(0 <= at <= 100 for at, _ in axis.ticks())
    assert Axis([MeasuredNumber(1.0), MeasuredNumber(10.0)]).low == 0.0
    assert Axis([MeasuredNumber(5.0), MeasuredNumber(5.0)]).at(5.0) == 50.0


def test_ratios_are_drawn_around_1() -> None:
    one, other = (
        RatioRow(name=name, link="", about="", ratio=MeasuredNumber(ratio), verdict=verdict, other="ring")
        for name, ratio, verdict in (("b", 0.9, "slower"), ("a", 1.2, "faster"))
    )
    made = ratio_dots([one, other])
    assert made.rows[1].at < made.line < made.rows[0].at
    assert [row.kind for row in made.rows] == ["faster", "slower"]
    assert ratio_dots([]) is None


def test_with_one_round_the_notes_say_why_nobody_is_faster() -> None:
    told = headline_of(rows_of([on_gpu(), on_gpu(method="ring", seconds=1.5)]))
    assert TOO_FEW_ROUNDS in told.notes
    assert TOO_FEW_ROUNDS not in headline_of(rows_of([on_gpu(rounds=around(1.0)), on_gpu(method="ring")])).notes


def test_attention_is_told_with_its_share_of_the_ideal() -> None:
    whole = on_gpu(task="attention", cp_size=1, seconds=4.0)
    shared = [on_gpu(task="attention", method=method, seconds=seconds)
              for method, seconds in (("burst", 1.25), ("ring", 2.0))]  # fmt: skip
    assert headline_of(rows_of([whole, *shared])).place.endswith("burst reaches 80% of one GPU's time ÷ 4")
    slow = [on_gpu(task="attention", method=method, seconds=seconds)
            for method, seconds in (("burst", 5.0), ("ring", 8.0))]  # fmt: skip
    assert headline_of(rows_of([whole, *slow])).place.endswith("one GPU alone is 1.25 times as fast as burst")


def test_training_on_gpus_is_told_before_attention_and_agreement() -> None:
    told = headline_of(rows_of(gpu_sweep()))
    assert told.place.startswith("Training 1b, 256k tokens, 4 × H200")
    assert CPU_TIMES not in told.notes
    assert any(note.startswith("In bf16, losses of trials") for note in told.notes)


def test_on_a_cpu_the_verdict_is_agreement_and_no_speed() -> None:
    told = headline_of(rows_of(cpu_sweep()))
    assert told.verdict.startswith("All methods and parallel sizes compute the same thing: losses and gradient norms ")
    assert told.rankings == []
    assert told.notes == [
        "Attention and its gradients differ from a dense float64 run by at most 3.0e-07 in fp32.",
        CPU_TIMES,
        "33 of 36 trials gave a measurement; 1 oom, 1 refused, 1 timeout.",
    ]
    assert CPU_TIMES not in headline_of(rows_of([record(), record(seq_len=2048)])).notes


def test_a_disagreement_comes_before_any_speed() -> None:
    told = headline_of(rows_of([on_gpu(dtype="fp32"), on_gpu(dtype="fp32", method="ring", drift=5e-4)]))
    assert told.verdict.startswith("1 of 1 trials do not compute the same thing as their reference")
    assert told.place == ""
    assert told.notes[0].startswith("burst ran 1.000 times as fast as ring")


def test_nothing_measured_and_nothing_recorded_are_told_plainly() -> None:
    assert headline_of([]).verdict == "No trial was recorded."
    assert headline_of(rows_of([on_gpu(status="oom")])).sentences == ["0 of 1 trial gave a measurement; 1 oom."]

"""The sentences above a report: few, with every figure, and `ahead` only where an interval says so."""

from __future__ import annotations

import pytest

from harness.records.record import Record
from harness.report.findings import MOST_FINDINGS, findings
from harness.report.headline import TOO_FEW_ROUNDS, summary_sentences
from harness.report.results import rows_of
from harness.report.tables.trials import CPU_TIMES
from tests.harness.synthetic_records import H200, LARGE, around, cpu_sweep, gpu_sweep, record


def on_gpu(**changes: object) -> Record:
    return record(**{"gpu": H200, "dtype": "bf16", "model": LARGE, "seq_len": 1 << 20, "cp_size": 4} | changes)  # type: ignore[arg-type]


def found(*trials: Record) -> list[str]:
    return findings(rows_of(trials))


def test_a_trial_alone_is_told_with_its_figures_and_that_there_is_no_baseline() -> None:
    trial = on_gpu(rounds=[[300.0]])
    [row] = rows_of([trial])
    [told] = findings([row])
    assert told == (
        f"Training 1b, 1M tokens, 4 × H200: burst, 873.8 tokens/s per GPU, {100 * row['mfu']:.1f}% MFU, "
        f"{100 * row['mfu'] / row['mfu_ceiling']:.1f}% of what the kernels allow, 5.75 GiB; one step, "
        "no baseline measured."
    )


def test_a_contest_names_the_best_other_method_with_ratio_interval_and_verdict() -> None:
    [told] = found(
        on_gpu(rounds=around(1.0)), on_gpu(method="ring", rounds=around(1.5)), on_gpu(method="ulysses", seconds=9.0)
    )
    assert "Training 1b, 1M tokens, 4 × H200: burst, 262,144 tokens/s per GPU (25" in told
    assert "9 steps in 3 rounds" in told
    assert "; ahead of ring, the best other: 1.50× its speed (1.500 to 1.500)" in told


def test_a_method_is_not_called_ahead_within_the_noise() -> None:
    ours = [[1.00, 1.01], [1.04, 1.05], [0.98, 0.99]]
    theirs = [[1.02, 1.03], [0.99, 1.00], [1.04, 1.05]]
    [told] = found(on_gpu(rounds=ours), on_gpu(method="ring", rounds=theirs))
    assert "; not distinguishable from ring, the best other: " in told
    assert "ahead" not in told


def test_with_one_round_there_is_a_ratio_and_one_sentence_says_why_nobody_is_ahead() -> None:
    rows = rows_of([on_gpu(seconds=1.0), on_gpu(method="ring", seconds=1.5)])
    told = summary_sentences(rows)
    assert told[0].endswith("3 steps in one round; 1.50× the speed of ring, the best other.")
    assert told[1] == TOO_FEW_ROUNDS
    assert not any("ahead" in one or "fastest" in one for one in told)


def test_ours_is_told_too_where_it_is_neither_the_best_nor_the_second() -> None:
    times = {"burst": 4.0, "ring": 2.0, "ulysses": 1.0}
    [told] = found(*(on_gpu(method=method, rounds=around(seconds)) for method, seconds in times.items()))
    assert "ulysses, 262,144" in told
    assert "ahead of ring, the best other: 2.00×" in told
    assert told.endswith("; burst behind ulysses: 0.25× its speed (0.250 to 0.250).")


def test_the_largest_contested_point_is_told_at_equal_settings() -> None:
    trials = [on_gpu(method=method, seq_len=1 << power, seconds=one) for power in (18, 19)
              for method, one in (("burst", 1.0), ("ring", 2.0))]  # fmt: skip
    [told] = found(*trials, on_gpu(seq_len=1 << 20))
    assert told.startswith("Training 1b, 512k tokens")


@pytest.mark.parametrize(("long", "crosses"), [((2.0, 1.0), True), ((1.0, 2.0), False), ((1.0, 1.0), False)])
def test_where_methods_change_places_is_told_only_where_both_sides_are_clear(long, crosses) -> None:
    trials = []
    for power, (ours, theirs) in ((16, (1.0, 2.0)), (18, (1.5, 1.5)), (20, long)):
        trials += [on_gpu(seq_len=1 << power, rounds=around(ours)),
                   on_gpu(method="ring", seq_len=1 << power, rounds=around(theirs))]  # fmt: skip
    told = found(*trials)
    assert ("Training 1b, 4 × H200: burst is ahead up to 64k tokens, ring from 1M." in told) is crosses


def test_a_swept_setting_is_told_with_what_it_costs_in_memory() -> None:
    from engine.settings import Checkpoint

    trials = [on_gpu(checkpoint=Checkpoint(tail=tail), rounds=around(seconds))
              for tail, seconds in ((0.0, 2.0), (0.5, 1.5), (1.0, 1.0))]  # fmt: skip
    for trial, gib in zip(trials, (10, 12, 14), strict=True):
        assert trial.measurement is not None
        trial.measurement.peak_allocated_bytes = [gib << 30] * 4
    [told] = found(*trials)
    assert "burst by checkpoint.tail, fastest with 1.0: 262,144 tokens/s per GPU" in told
    assert "14.0 GiB; 9 steps in 3 rounds; ahead of 0.5: 1.50× its speed" in told
    assert told.endswith("; least memory with 0.0: 10.0 GiB at 0.50× that speed; no baseline measured.")


def test_levers_are_named_by_what_they_change_and_a_lost_one_by_its_status() -> None:
    trials = [on_gpu(seconds=1.0), on_gpu(mlp_tiles=8, seconds=1.1), on_gpu(optimizer_offload=True, seconds=1.3)]
    [told] = found(*trials, on_gpu(projection_tiles=8, status="oom"))
    assert "burst by mlp_tiles and optimizer_offload, lowest median with none of them changed: " in told
    assert "1.10× the speed of mlp_tiles 8" in told
    assert "no number from mlp_tiles 1, optimizer_offload off (oom)" in told


def test_methods_that_gave_no_number_are_no_missing_baseline() -> None:
    [told] = found(on_gpu(), on_gpu(method="ring", status="oom"), on_gpu(method="ulysses", status="refused"))
    assert told.endswith("no other method gave a number (ring oom, ulysses refused).")


def test_attention_is_told_with_its_share_of_the_ideal() -> None:
    whole = on_gpu(task="attention", cp_size=1, seconds=4.0)
    shared = [on_gpu(task="attention", method=method, seconds=seconds)
              for method, seconds in (("burst", 1.25), ("ring", 2.0))]  # fmt: skip
    [told] = found(whole, *shared)
    assert "80.0% of the ideal (one GPU's time ÷ 4)" in told
    assert "TFLOP/s per GPU" in told
    assert "MFU" not in told


def test_mask_dtype_and_emulated_nodes_are_part_of_the_place() -> None:
    [told] = found(on_gpu(mask="sliding_window:4095", dtype="fp32", emulate_nodes=2, batch_size=2))
    assert told.startswith("Training 1b, fp32, 2 × 1M tokens, mask sliding_window:4095, 4 × H200 on 2 emulated nodes: ")


def test_of_several_runs_each_sentence_names_its_own() -> None:
    told = findings([*rows_of([on_gpu()], run="monday"), *rows_of([on_gpu()], run="tuesday")])
    assert [one.split(": ")[0] for one in told] == ["monday", "tuesday"]


def test_findings_are_few_and_contests_come_first() -> None:
    trials = [on_gpu(mask=f"sliding_window:{width}", seconds=1.0) for width in range(20)]
    trials += [on_gpu(method=method, seq_len=4096) for method in ("burst", "ring")]
    told = found(*trials)
    assert len(told) == MOST_FINDINGS + 1
    assert "the best other" in told[0]
    assert told[-1] == "13 more set-ups are in the tables."


def test_training_is_told_before_attention() -> None:
    told = summary_sentences(rows_of(gpu_sweep()))
    assert [one.split(" 1b")[0] for one in told[:2]] == ["Training", "Attention"]
    assert CPU_TIMES not in told


def test_on_a_cpu_nobody_is_faster_and_agreement_is_what_is_told() -> None:
    told = summary_sentences(rows_of(cpu_sweep()))
    assert told[0] == CPU_TIMES
    assert told[1].startswith("Losses and gradient norms agree within 1e-04 between all methods and parallel sizes")
    assert (
        told[2] == "Attention and its gradients differ from a dense float64 run by at most 3.0e-07 in fp32, relative."
    )
    assert told[3] == "33 of 36 trials gave a measurement; 1 oom, 1 refused, 1 timeout."
    assert len(told) == 4


def test_a_single_method_on_a_cpu_needs_no_warning() -> None:
    assert CPU_TIMES not in summary_sentences(rows_of([record(), record(seq_len=2048)]))


def test_a_disagreement_comes_before_any_finding() -> None:
    told = summary_sentences(rows_of([on_gpu(dtype="fp32"), on_gpu(dtype="fp32", method="ring", drift=5e-4)]))
    assert told[0].startswith("1 of 1 trials differ from their reference by more than 1e-04")
    assert told[1].startswith("Training 1b")


def test_nothing_measured_and_nothing_recorded_are_told_plainly() -> None:
    assert summary_sentences([]) == ["No trial was recorded."]
    assert summary_sentences(rows_of([on_gpu(status="oom")])) == ["0 of 1 trial gave a measurement; 1 oom."]

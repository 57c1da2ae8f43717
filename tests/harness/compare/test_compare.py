"""`burst compare`: pairs of equal settings, what is said of each, and when it counts as a regression."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from engine.settings import Checkpoint, Steps
from harness.cli import main
from harness.commands import parse_tolerance
from harness.compare.pairs import Comparison, compare, of_directory
from harness.compare.report import closing, comparison_of, heading, pair_lines, to_plain, trial_names
from harness.records.record import Record, write_record
from harness.report.results import row_of
from harness.report.speedup import speedup
from tests.harness.report.test_report import run_of
from tests.harness.synthetic_records import H200, around, record

H100 = "NVIDIA H100 80GB HBM3"


def compared(
    folder: Path, reference: Sequence[Record], candidate: Sequence[Record], tolerance: float = 0.02
) -> Comparison:
    sides = [run_of(folder / name, records) for name, records in (("a", reference), ("b", candidate))]
    return compare(("a", "b"), *map(of_directory, sides), tolerance=tolerance)


def with_memory(trial: Record, gib: float) -> Record:
    assert trial.measurement is not None
    trial.measurement.peak_allocated_bytes = [int(gib * 2**30)] * trial.settings.world_size
    return trial


def with_commit(trial: Record, commit: str, started_at: str = "2026-01-02T03:04:05Z") -> Record:
    return replace(trial, commit=commit, started_at=started_at)


def next_day(trial: Record) -> Record:
    """The same figures from another run."""
    rounds = [replace(one, started_at=one.started_at.replace("-02T", "-03T")) for one in trial.rounds]
    return replace(trial, started_at=trial.started_at.replace("-02T", "-03T"), rounds=rounds)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return capsys.readouterr().out


# Pairs.


def test_trials_are_paired_by_their_settings_whatever_their_steps(tmp_path: Path) -> None:
    before = [record(seq_len=1024, steps=Steps(measured=3)), record(seq_len=2048)]
    now = [record(seq_len=1024, steps=Steps(measured=9, warmup=2)), record(seq_len=4096)]
    assert before[0].trial_id != now[0].trial_id
    found = compared(tmp_path, before, now)
    [pair] = found.pairs
    assert (pair.reference.row["samples"], pair.candidate.row["samples"]) == (3, 9)
    assert [member.row["seq_len"] for member in found.only_reference] == [2048]
    assert [member.row["seq_len"] for member in found.only_candidate] == [4096]


def test_other_steps_are_listed_among_the_differences_and_other_rounds_are_not(tmp_path: Path, capsys) -> None:
    run_of(tmp_path / "a", [record(task="train", steps=Steps(measured=3), rounds=[[0.1] * 3])])
    now = record(task="train", steps=Steps(measured=5, warmup=2, warmup_seq_len=512), rounds=[[0.1] * 5] * 2)
    run_of(tmp_path / "b", [now])
    sides = [str(tmp_path / name) for name in ("a", "b")]
    assert main(["compare", *sides]) == 0
    assert [line for line in said(capsys).splitlines() if line.startswith("Differs")] == [
        "Differs: steps.measured: A 3, B 5 (all pairs)",
        "Differs: steps.warmup: A 1, B 2 (all pairs)",
        "Differs: steps.warmup_seq_len: A 0, B 512 (all pairs)",
    ]
    assert main(["compare", *sides, "--json"]) == 0
    found = json.loads(said(capsys))["differences"]
    assert {"fact": "steps.measured", "reference": "3", "candidate": "5", "pairs": 1} in found


@pytest.mark.parametrize(
    ("seconds", "verdict", "regression"),
    [(0.2, "not distinguishable", ""), (0.3, "slower", "slower (1.500 × the time)"), (0.1, "faster", ""),
     (0.2 * 1.019, "slower", "")],
)  # fmt: skip
def test_slower_is_a_regression_beyond_the_tolerance(tmp_path, seconds, verdict, regression) -> None:
    steady = [[0.2, 0.2], [0.2, 0.2002], [0.2, 0.1998]]
    now = [[step * seconds / 0.2 for step in steps] for steps in steady]
    [pair] = compared(tmp_path, [record(rounds=steady)], [record(rounds=now)]).pairs
    assert pair.times is not None
    assert pair.times.value == pytest.approx(seconds / 0.2)
    assert (pair.times.verdict(), pair.regression(0.02)) == (verdict, regression)


def test_the_whole_interval_has_to_be_beyond_the_tolerance(tmp_path: Path) -> None:
    noisy = [[0.20, 0.21], [0.25, 0.26], [0.22, 0.23]]
    [pair] = compared(tmp_path, [record(rounds=around(0.2))], [record(rounds=noisy)]).pairs
    assert pair.times is not None
    assert pair.times.value > 1.05
    assert pair.regression(0.02) == ""


def test_one_round_has_no_interval_and_is_no_regression_of_time(tmp_path: Path) -> None:
    found = compared(tmp_path, [record(seconds=0.1)], [record(seconds=0.9)])
    [pair] = found.pairs
    assert pair.times is not None
    assert (pair.times.interval, pair.regression(0.02)) == (None, "")
    names = trial_names(found)
    assert "9.000 one round not judged" in " ".join(pair_lines(found, names)[2].split())
    [line] = comparison_of(found, names).texts()
    assert "not judged (one round)" in line
    [last] = closing(found, names)
    assert last.startswith("B against A in 1 pair: 1 not judged; ")
    assert last.endswith(
        " 9.000. The time of the pair is not judged, with too few rounds; steps.rounds: 3 gives an interval."
    )
    plain = to_plain(found, names)
    assert (plain["not_judged"], plain["verdicts"]) == (1, {"not distinguishable": 1})
    time = plain["pairs"][0]["time"]
    assert (time["judged"], time["verdict"]) == (False, "not distinguishable")  # the value that scripts know


def test_no_regression_is_said_of_the_pairs_alone_that_have_rounds_enough(tmp_path: Path) -> None:
    lengths = {1024: around(0.2), 2048: [[0.2]], 4096: [[0.1], [0.3]]}
    trials = [record(seq_len=length, rounds=rounds) for length, rounds in lengths.items()]
    found = compared(tmp_path, trials, list(map(next_day, trials)))
    assert "B against A in 3 pairs: 1 not distinguishable, 2 not judged" in closing(found, trial_names(found))[-1]
    assert closing(found, trial_names(found))[-1].endswith(
        "No regression beyond 2%. The time of 2 of 3 pairs is not judged, with too few rounds; steps.rounds: 3 gives "
        "an interval."
    )


def test_two_rounds_are_shown_as_two_values_and_both_slower_are_a_regression(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [record(rounds=[[0.1], [0.2]]), record(method="ring", rounds=[[0.2], [0.5]])])
    sides = [[one for one in of_directory(run) if one.row["method"] == name] for name in ("burst", "ring")]
    found = compare(("a", "b"), *sides, tolerance=0.02, across=["method"], one_run=True)
    [pair] = found.pairs
    assert pair.times is not None
    assert (pair.times.interval, pair.times.by_round) == (None, (2.0, 2.5))
    assert (pair.regression(0.02), pair.regression(0.99)) == ("slower in both rounds (2.333 × the time)",) * 2
    assert pair.regression(1.2) == ""
    names = trial_names(found)
    assert "2.333 2.000 and 2.500 slower in both rounds" in " ".join(pair_lines(found, names)[2].split())
    *_, listed, last = closing(found, names)
    assert listed.endswith(": slower in both rounds (2.333 × the time)")
    assert "1 slower in both rounds; " in last
    assert last.endswith(" 1 regression beyond 2%.")
    assert main(["compare", str(run), "--methods", "burst", "ring"]) == 1
    assert main(["compare", str(run), "--methods", "ring", "burst"]) == 0
    [line] = comparison_of(found, names).texts()
    assert {"2.000 and 2.500", "slower in both rounds"} <= set(line)
    plain = to_plain(found, names)["pairs"][0]["time"]
    assert (plain["interval"], plain["by_round"]) == (None, [2.0, 2.5])


def test_rounds_that_ran_on_two_machines_are_no_pairs(tmp_path: Path) -> None:
    ours, theirs = record(rounds=[[0.1], [0.1], [0.1]]), record(method="ring", rounds=[[0.2], [0.2], [0.2]])
    places = {"burst": ["a", "b", "b"], "ring": ["a", "a", "b"]}
    for one in (ours, theirs):
        one.rounds = [
            replace(part, hosts=["vm"], gpus=[gpu])
            for part, gpu in zip(one.rounds, places[one.settings.method], strict=True)
        ]
    run = run_of(tmp_path / "run", [ours, theirs])
    sides = [[one for one in of_directory(run) if one.row["method"] == name] for name in ("burst", "ring")]
    found = compare(("a", "b"), *sides, tolerance=0.02, across=["method"], one_run=True)
    [pair] = found.pairs
    assert pair.times is not None
    assert (pair.paired, pair.apart, pair.times.by_round) == (True, (2,), (2.0, 2.0))
    assert "Left out: round 2 of 1 pair, which ran on two machines." in heading(found)


def test_a_trial_that_ran_again_later_is_no_pair_with_the_rounds_before(tmp_path: Path, capsys) -> None:
    # Round 2 is slow for both: in pairs that cancels out.
    steps = [[0.100, 0.1001], [0.110, 0.1101], [0.100, 0.1001], [0.105, 0.1051]]
    longer = [[1.02 * step for step in of_round] for of_round in steps]
    trials = [record(rounds=steps), record(method="ring", rounds=longer)]
    run = run_of(tmp_path / "run", [*trials, next_day(record(method="ulysses", rounds=longer))])
    assert main(["compare", str(run), "--methods", "burst", "ring"]) == 0
    text = said(capsys)
    assert "Both sides of a pair ran in the same rounds, which are drawn together." in text
    assert "1 slower" in text
    assert main(["compare", str(run), "--methods", "burst", "ulysses", "--json"]) == 0
    time = json.loads(said(capsys))["pairs"][0]["time"]
    assert (time["paired"], time["one_side_ran_later"], time["verdict"]) == (False, True, "not distinguishable")
    assert main(["compare", str(run), "--methods", "burst", "ulysses"]) == 0
    text = said(capsys)
    assert "In 1 pair one side ran later than the other: rounds are drawn one by one." in text
    assert "drawn together" not in text


def test_how_many_pairs_ran_in_the_same_rounds_is_said_where_not_all_did(tmp_path: Path) -> None:
    trials = [record(method=method, seq_len=length, rounds=around(0.2))
              for method in ("burst", "ring") for length in (1024, 2048)]  # fmt: skip
    run = run_of(tmp_path / "run", [*trials[:3], next_day(trials[3])])
    sides = [[one for one in of_directory(run) if one.row["method"] == name] for name in ("burst", "ring")]
    lines = heading(compare(("a", "b"), *sides, tolerance=0.02, across=["method"], one_run=True))
    assert "Both sides of 1 of 2 pairs ran in the same rounds, which are drawn together." in lines
    assert "In 1 pair one side ran later than the other: rounds are drawn one by one." in lines


def test_a_round_of_which_one_of_several_trials_ran_elsewhere_is_no_pair(tmp_path: Path) -> None:
    ours, theirs = record(rounds=[[0.1], [0.1]]), record(method="ring", rounds=[[0.2], [0.2]])
    elsewhere = record(method="ring", seed=1, rounds=[[0.2], [0.2]])
    for one, hosts in ((ours, "aa"), (theirs, "aa"), (elsewhere, "ab")):
        one.rounds = [replace(part, hosts=[host]) for part, host in zip(one.rounds, hosts, strict=True)]
    found = speedup([row_of(ours)], [row_of(theirs), row_of(elsewhere)])
    assert found is not None
    assert (found.apart, found.rounds) == ((2,), 1)


@pytest.mark.parametrize(
    ("gib", "word", "regression"),
    [(20.0, "equal", ""), (20.3, "equal", ""), (22.0, "more", "more memory (+10.0%)"), (10.0, "less", "")],
)
def test_memory_is_compared_by_its_peaks(tmp_path, gib, word, regression) -> None:
    before, now = with_memory(record(gpu=H200), 20.0), with_memory(record(gpu=H200), gib)
    [pair] = compared(tmp_path, [before], [now]).pairs
    assert (pair.memory_word(0.02), pair.regression(0.02)) == (word, regression)


def test_memory_of_processes_that_ran_several_trials_gets_no_verdict(tmp_path: Path) -> None:
    alone, shared = record(), replace(record(), ranks_turn=2)
    [pair] = compared(tmp_path / "cpu", [alone], [shared]).pairs
    assert (pair.memory_column, pair.memory_word(0.02)) == (None, None)
    [pair] = compared(tmp_path / "alone", [alone], [alone]).pairs
    assert (pair.memory_column, pair.memory_word(0.02)) == ("peak_rss_gib", "equal")
    on_gpus = [with_memory(replace(record(gpu=H200), ranks_turn=turn), 20.0) for turn in (1, 2)]
    [pair] = compared(tmp_path / "gpu", on_gpus[:1], on_gpus[1:]).pairs
    assert pair.memory_column == "peak_memory_gib"


def test_what_was_measured_and_is_no_more_is_a_regression_and_the_reverse_is_none(tmp_path: Path) -> None:
    lost = [record(seq_len=1024), record(seq_len=2048, status="oom"), record(seq_len=4096, status="oom")]
    now = [record(seq_len=1024, status="oom", reason="rank 0 ran out"), record(seq_len=2048), lost[2]]
    found = compared(tmp_path, lost, now)
    assert [pair.outcome for pair in found.pairs] == ["lost", "gained", "neither"]
    assert [pair.regression(0.02) for pair in found.pairs] == ["no number in B (oom: rank 0 ran out)", "", ""]
    [sentence] = [line for line in closing(found, trial_names(found)) if line.startswith("B against A")]
    assert "1 measured in A alone, 1 measured in B alone, 1 without a number in both" in sentence


def test_losses_are_compared_where_both_trained(tmp_path: Path) -> None:
    before = [record(), record(task="attention")]
    found = compared(tmp_path, before, [record(drift=1e-3), record(task="attention")])
    assert [pair.loss for pair in found.pairs] == [pytest.approx(1e-3, rel=0.01), None]


def test_a_loss_from_other_initial_weights_is_not_compared(tmp_path: Path) -> None:
    run = run_of(tmp_path / "run", [record(), record(method="torchtitan_upstream", drift=0.3)])
    sides = [
        [one for one in of_directory(run) if one.row["method"] == name] for name in ("torchtitan_upstream", "burst")
    ]
    [pair] = compare(("a", "b"), *sides, tolerance=0.02, across=["method"], one_run=True).pairs
    assert pair.loss is None
    [same] = compare(("a", "b"), sides[0], sides[0], tolerance=0.02).pairs
    assert same.loss == 0.0


def test_different_hardware_software_and_hosts_are_named(tmp_path: Path) -> None:
    before, now = record(gpu=H200), record(gpu=H100)
    assert before.measurement is not None
    assert now.measurement is not None
    before.measurement.software["driver"] = "580.1"
    now.measurement.software |= {"driver": "575.2", "torch": "2.13.0"}
    now.hosts = ["node7"]
    lines = heading(compared(tmp_path, [before], [now]))
    assert lines[2] == "A and B ran on different GPUs: ratios of such pairs compare machines as well."
    assert lines[3:] == [
        f"Differs: GPU: A {H200}, B {H100} (all pairs)",
        "Differs: driver: A 580.1, B 575.2 (all pairs)",
        "Differs: software torch: A 2.11.0+cu130, B 2.13.0 (all pairs)",
        "Differs: hosts: A node0, B node7 (all pairs)",
    ]


def test_packages_that_one_side_alone_has_are_counted_beyond_the_first(tmp_path: Path) -> None:
    other = record()
    assert other.measurement is not None
    other.measurement.software |= {f"own{number}": "1.0" for number in range(7)}
    lines = heading(compared(tmp_path, [record()], [other]))
    assert [line for line in lines if "own" in line] == [
        f"Differs: software own{number}: A not recorded, B 1.0 (all pairs)" for number in range(4)
    ]
    assert "Differs: 3 more packages that one of the two has (--json lists all)" in lines


def test_rounds_of_two_runs_are_never_drawn_in_pairs(tmp_path: Path) -> None:
    [pair] = compared(tmp_path, [record(rounds=around(0.2))], [record(rounds=around(0.2))]).pairs
    assert not pair.paired


def test_of_several_records_with_equal_settings_the_latest_counts(tmp_path: Path) -> None:
    early = [record(steps=Steps(measured=measured)) for measured in (3, 4)]
    early[1].started_at = "2026-02-02T03:04:05Z"
    found = compared(tmp_path, early, [record()])
    [pair] = found.pairs
    assert pair.reference.row["samples"] == 4
    assert "1 earlier record is passed over: of equal settings on one side the latest counts." in heading(found)


def test_names_tell_all_pairs_apart(tmp_path: Path) -> None:
    trials = [record(), record(kernel="flex"), record(mask="full"), record(method="ring"), record(cp_size=2)]
    found = compared(tmp_path, trials, trials)
    names = [trial_names(found)[id(pair.reference)] for pair in found.pairs]
    assert len(set(names)) == len(trials)
    assert "train small 1k CP 1 burst, kernel flex, mask causal" in names


def test_what_a_planner_chose_is_in_no_name_and_parts_no_pair(tmp_path: Path) -> None:
    trials = [record(planned="checkpoint.every checkpoint.tail"), record(task="attention")]
    found = compared(tmp_path, trials, [record(planned="checkpoint.every checkpoint.tail mlp_tiles"), trials[1]])
    names = trial_names(found)
    assert [names[id(pair.reference)] for pair in found.pairs] == [
        "train small 1k CP 1 burst", "attention small 1k CP 1 burst",
    ]  # fmt: skip


def test_lines_fit_80_columns(tmp_path: Path) -> None:
    trials = [
        record(gpu=H200, seconds=10.0, rounds=around(10.0, steps=5)),
        record(gpu=H200, method="loongtrain_double_ring"),
    ]
    found = compared(tmp_path, trials, [with_memory(replace(trial), 99.0) for trial in trials])
    assert max(map(len, pair_lines(found, trial_names(found)))) <= 80


# The command.


def test_two_real_runs_are_compared_whatever_their_steps(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exp.yaml").write_text(
        "task: train\nmodel: tiny\nfixed: {method: burst, seq_len: 128, dtype: fp32}\nsteps: {warmup: 1, measured: 2}\n"
    )
    for out, measured in (("first", 2), ("second", 3)):
        assert (
            main(["run", "exp.yaml", "--launcher", "local", "--out", out, "--set", f"steps.measured={measured}"]) == 0
        )
    capsys.readouterr()
    assert main(["compare", "first", "second", "--tolerance", "90%", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [pair] = found["pairs"]
    assert (pair["reference"]["samples"], pair["candidate"]["samples"]) == (2, 3)
    assert pair["loss_difference"] < 1e-6  # over the steps that both took
    assert pair["time"]["verdict"] == "not distinguishable"  # one round each
    assert pair["memory"]["of"] == "peak_rss_gib"
    assert not {fact["fact"] for fact in found["differences"]} & {"GPU", "driver", "hosts", "launcher", "commit"}


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Run `a`, and `b` in which one trial is slower."""
    monkeypatch.chdir(tmp_path)
    run_of(Path("a"), [record(rounds=around(0.2)), record(method="ring", rounds=around(0.3))])
    run_of(Path("b"), [next_day(record(rounds=around(0.2))), next_day(record(method="ring", rounds=around(0.4)))])
    return tmp_path


def test_two_runs_are_compared_and_a_regression_ends_with_1(runs: Path, capsys) -> None:
    assert main(["compare", "a", "b"]) == 1
    text = said(capsys)
    assert "A (reference): a" in text
    assert "! train small 1k CP 1 ring" in text
    assert "Regression: train small 1k CP 1 ring: slower (1.333 × the time)" in text
    assert text.endswith(
        "B against A in 2 pairs: 1 slower, 1 not distinguishable; memory equal in 2; geometric mean of the times "
        "B ÷ A 1.155. 1 regression beyond 2%.\n"
    )


def test_a_tolerance_forgives_and_the_reverse_is_no_regression(runs: Path, capsys) -> None:
    assert main(["compare", "a", "b", "--tolerance", "0.4"]) == 0
    assert main(["compare", "b", "a"]) == 0
    assert "No regression beyond 2%." in said(capsys)


def test_two_methods_of_one_run_are_compared_in_the_same_rounds(runs: Path, capsys) -> None:
    assert main(["compare", "a", "--methods", "ring", "burst"]) == 0
    text = said(capsys)
    assert "Both sides of a pair ran in the same rounds, which are drawn together." in text
    assert "train small 1k CP 1\n" in text
    assert "1 faster" in text
    assert main(["compare", "a", "--methods", "burst", "ring"]) == 1


def test_methods_of_different_runs_are_never_paired(tmp_path: Path, capsys) -> None:
    run_of(tmp_path / "all" / "a", [record()])
    run_of(tmp_path / "all" / "b", [record(method="ring")])
    assert main(["compare", str(tmp_path / "all"), "--methods", "burst", "ring"]) == 2
    assert (
        "nothing to compare: the records found are 1 of burst and 1 of ring, and no two of them have equal settings"
        in (capsys.readouterr().err)
    )


def test_records_of_two_commits_are_found_among_attempts_and_runs_moved_aside(tmp_path: Path, capsys) -> None:
    kept = tmp_path / "runs"
    run_of(kept / "quickstart", [with_commit(record(seq_len=1024), "ccc3")])
    attempts = kept / "quickstart" / "trials" / record(seq_len=1024).trial_id / "attempts"
    write_record(attempts / "1", with_commit(record(seq_len=1024, seconds=0.1), "aaa1"))
    write_record(attempts / "2", with_commit(record(seq_len=1024, seconds=0.15), "bbb2-dirty"))
    run_of(kept / "quickstart.20260102-030405", [with_commit(record(seq_len=2048), "aaa1")])
    run_of(kept / "quickstart.20260103-030405-2", [with_commit(record(seq_len=2048), "ccc3")])
    run_of(kept / "quickstart_other", [with_commit(record(seq_len=4096), "aaa1")])
    assert main(["compare", str(kept / "quickstart"), "--commits", "aaa", "ccc", "--json"]) == 0
    found = json.loads(said(capsys))
    assert [pair["time"]["ratio"] for pair in found["pairs"]] == [pytest.approx(2.0), pytest.approx(1.0)]
    assert found["only_reference"] == []
    assert main(["compare", str(kept), "--commits", "aaa", "ccc", "--json"]) == 0
    assert len(json.loads(said(capsys))["only_reference"]) == 1
    assert main(["compare", str(kept), "--commits", "bbb2-dirty", "ccc"]) == 0


@pytest.mark.parametrize(
    ("commits", "message"),
    [
        (["0123a", "fff"], "--commits fff: no record is of it; these are of 0123abc or 0123def"),
        (["0123", "0123def"], "--commits 0123: several of these begin so: 0123abc or 0123def; give more"),
        (["0123abc", "0123abc"], "A and B are both commit 0123abc; name two different things to compare"),
    ],
)
def test_an_unknown_or_ambiguous_commit_is_refused(tmp_path, capsys, commits, message) -> None:
    run_of(tmp_path, [record(), with_commit(record(seq_len=2048), "0123def")])
    assert main(["compare", str(tmp_path), "--commits", *commits]) == 2
    assert message in capsys.readouterr().err


def test_json_holds_every_pair_and_what_has_no_partner(runs: Path, capsys) -> None:
    run_of(Path("b"), [record(seq_len=4096, status="oom")])
    assert main(["compare", "a", "b", "--json"]) == 1
    found = json.loads(said(capsys))
    assert (found["schema"], found["regressions"], found["verdicts"]) == (1, 1, {"slower": 1, "not distinguishable": 1})
    [_, pair] = found["pairs"]
    assert pair["regression"] == "slower (1.333 × the time)"
    assert pair["time"]["verdict"] == "slower"
    assert pair["time"]["interval"][0] < pair["time"]["ratio"] < pair["time"]["interval"][1]
    assert (pair["reference"]["samples"], pair["reference"]["rounds"]) == (9, 3)
    assert [one["status"] for one in found["only_candidate"]] == ["oom"]


def test_the_table_is_written_in_every_form_that_is_asked_for(runs: Path) -> None:
    assert main(["compare", "a", "b", "--out", "out"]) == 1
    assert {path.name for path in Path("out").iterdir()} == {"compare.md", "compare.csv", "compare.tex"}
    with open("out/compare.csv", newline="") as file:
        [_, line] = csv.DictReader(file)
    assert (line["verdict"], line["regression"]) == ("slower", "slower (1.333 × the time)")
    assert float(line["B ÷ A"]) == pytest.approx(4 / 3)
    assert Path("out/compare.tex").read_text().isascii()
    assert main(["compare", "a", "b", "--out", "one", "--format", "md"]) == 1
    assert [path.name for path in Path("one").iterdir()] == ["compare.md"]


@pytest.mark.parametrize("kind", ["md", "csv", "tex"])
def test_a_table_replaces_its_own_earlier_one_and_no_file_of_a_user(runs: Path, capsys, kind: str) -> None:
    own = Path("out") / f"compare.{kind}"
    for _ in range(2):
        assert main(["compare", "a", "b", "--out", "out"]) == 1
    own.write_text("| my | notes |\n")
    others = {path: path.stat().st_mtime_ns for path in Path("out").iterdir()}
    assert main(["compare", "a", "b", "--out", "out"]) == 2
    assert f"{own} is no earlier {own.name} of burst and would be overwritten" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in Path("out").iterdir()} == others


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--across", "dtyp"], "--across dtyp: no trial of these records has it; did you mean dtype?"),
        (["a", "--across", "foo"], "--across foo: no trial of these records has it; expected method\n"),
        (["a", "--across", "dtype"], "a has 1 value (dtype fp32) of dtype; expected two to compare"),
        (["a", "b", "--across", "method"], "a has 2 values (method burst, method ring) of method; expected one"),
        (["a", "b", "a", "--across", "dtype"], "3 directories given; --across compares two runs, or two values"),
        (["a", "b", "a"], "3 directories given; expected A and B"),
        (["a", "a"], "A and B are both a; name two different things to compare"),
        (["a", "./a/../a"], "name two different things to compare"),
        (["a", "."], "A and B share 2 records, which would be compared with themselves"),
        (["a", "nowhere"], "nowhere does not exist; name a run"),
        (["a", "--methods", "burst", "rin"], "no trial of these records is of that method; did you mean ring?"),
        (["a", "--methods", "ring", "ring"], "A and B are both ring"),
        (["a", "b", "--tolerance", "2"], "--tolerance 2: expected a share from 0 to below 1, such as 2% or 0.02"),
        (["a", "b", "--format", "md"], "--format is given without --out"),
        (["a", "b", "--out", "o", "--format", "docx"], "--format docx: expected a list of md,csv,tex"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_refused_in_one_sentence(runs: Path, capsys, arguments, message) -> None:
    assert main(["compare", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.out == ""
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("form", ["copy", "packed", "copy with a further round"])
def test_a_copy_of_a_run_is_not_compared_with_it(form: str, runs: Path, capsys) -> None:
    """Its steps are equal because they are the same steps: "no regression" would say nothing."""
    other = "c.jsonl" if form == "packed" else "c"
    if form == "packed":
        assert main(["verify", "pack", "a", "--out", other]) == 0
    else:
        run_of(Path("c"), [record(rounds=around(0.2, rounds=4 if "further" in form else 3))])
    capsys.readouterr()
    assert main(["compare", "a", other]) == 2
    captured = capsys.readouterr()
    count = "2 records" if form == "packed" else "1 record"
    assert f"A and B share {count}, which would be compared with themselves; name two separate runs" in captured.err
    assert captured.out == ""


def test_runs_without_a_common_number_are_refused(tmp_path: Path, capsys) -> None:
    run_of(tmp_path / "a", [record(status="oom")])
    run_of(tmp_path / "b", [record(status="failed")])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "no pair of them has a number; name runs of one experiment" in capsys.readouterr().err


def test_a_bad_record_is_refused_by_name(runs: Path, capsys) -> None:
    [bad, *_] = sorted(Path("b").glob("trials/*/record.json"))
    bad.write_text("{}")
    assert main(["compare", "a", "b"]) == 2
    assert str(bad) in capsys.readouterr().err


def test_one_run_compares_our_method_with_each_other_one(runs: Path, capsys) -> None:
    run_of(Path("a"), [record(method="ulysses", rounds=around(0.1)), record(method="usp", seq_len=2048)])
    assert main(["compare", "a"]) == 1  # Ulysses is faster
    text = said(capsys)
    assert text.index("A (reference): ring") < text.index("A (reference): ulysses")
    assert "usp" not in text.replace("usp (", "")  # no trial of equal settings
    assert text.count("B (candidate): burst") == 2
    assert "Regression: train small 1k CP 1: slower (2.000 × the time)" in text
    assert main(["compare", "a", "--json", "--out", "out"]) == 1
    found = json.loads(said(capsys))
    assert [(one["reference"], one["candidate"], one["regressions"]) for one in found["comparisons"]] == [
        ("ring", "burst", 0),
        ("ulysses", "burst", 1),
    ]
    assert {path.stem for path in Path("out").iterdir()} == {"compare_ring", "compare_ulysses"}


def test_one_run_of_one_method_or_without_ours_is_refused_with_what_to_name(tmp_path: Path, capsys) -> None:
    alone = run_of(tmp_path / "alone", [record()])
    assert main(["compare", str(alone)]) == 2
    assert "alone are of one method, burst; name another run beside it, or a setting" in capsys.readouterr().err
    theirs = run_of(tmp_path / "theirs", [record(method="ring"), record(method="usp")])
    assert main(["compare", str(theirs)]) == 2
    assert "theirs has no trial of burst; name two of ring, usp with --methods" in capsys.readouterr().err
    apart = run_of(tmp_path / "apart", [record(), record(method="ring", seq_len=2048)])
    assert main(["compare", str(apart)]) == 2
    assert "no trial of burst in" in capsys.readouterr().err


def test_runs_that_differ_in_one_setting_are_paired_across_it(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    run_of(Path("a"), [record(dtype="bf16", seq_len=length, rounds=around(0.2)) for length in (1024, 2048)])
    run_of(Path("b"), [record(dtype="fp32", seq_len=length, rounds=around(0.3)) for length in (1024, 2048)])
    assert main(["compare", "a", "b"]) == 2
    refused = capsys.readouterr().err
    assert "no two of them have equal settings; the most alike are dtype bf16 and dtype fp32: --across dtype" in refused
    assert main(["compare", "a", "b", "--across", "dtype"]) == 1
    text = said(capsys)
    assert "A (reference): a, dtype bf16\nB (candidate): b, dtype fp32\n" in text
    assert "train small 2k CP 1 burst\n" in text
    assert "B against A in 2 pairs: 2 slower" in text
    assert main(["compare", "a", "a", "--across", "dtype"]) == 2
    assert "A and B both have dtype bf16; leave --across dtype out" in capsys.readouterr().err


def test_commits_without_equal_settings_are_not_sent_to_an_option_that_excludes_them(tmp_path: Path, capsys) -> None:
    run_of(tmp_path, [record(dtype="bf16"), with_commit(record(dtype="fp32"), "0123def")])
    assert main(["compare", str(tmp_path), "--commits", "0123a", "0123d"]) == 2
    said_of_it = capsys.readouterr().err
    assert "no two of them have equal settings; name commits that ran trials of equal settings" in said_of_it


def test_two_values_of_a_setting_in_one_run_are_compared_in_its_rounds(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    kinds = [record(checkpoint=Checkpoint(every=every), rounds=around(0.2)) for every in (0, 2)]
    run_of(Path("a"), kinds)
    assert main(["compare", "a", "--across", "checkpoint"]) == 0
    text = said(capsys)
    assert sorted(line.partition(": ")[2] for line in text.splitlines()[:2]) == ["every 0", "every 2"]
    assert "Both sides of a pair ran in the same rounds, which are drawn together." in text
    assert "B against A in 1 pair: 1 not distinguishable" in text


def test_text_of_a_record_does_not_control_the_terminal(tmp_path: Path, capsys) -> None:
    run_of(tmp_path / "a", [record()])
    run_of(tmp_path / "b", [record(status="failed", reason="\x1b[2J\nRegression: none")])
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    text = said(capsys)
    assert "\x1b" not in text
    assert "\nRegression: none" not in text


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.02", 0.02), (" 0 ", 0.0), ("0%", 0.0), ("50 %", 0.5)])
def test_a_tolerance_is_a_share_or_a_percentage(text: str, share: float) -> None:
    assert parse_tolerance(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "two", "nan", "inf", "-1%", "100%", "1"])
def test_other_tolerances_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a share"):
        parse_tolerance(text)

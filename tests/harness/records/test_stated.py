"""provenance.yaml is read strictly, and what it states reaches the rows beside what a record shows itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.measurement import ALLOCATION_RETRIES, WARM_UP, GpuState
from harness.base.errors import UsageError
from harness.records.record import Round, write_record
from harness.records.stated import NOTHING_STATED, caveats_of, stated_in
from harness.report.page import read_runs
from tests.harness.synthetic_records import record

WHOLE = """
command:
  - trials: [train-ring-*]
    command: burst run ring.yaml
  - command: burst run all.yaml
reasons:
  - trials: train-burst-*
    about: [driver, gpu]
    says: measured before records
      kept the driver
  - about: commit
    says: its commit is gone
machines:
  - {trials: train-ring-*, rounds: [2], machine: second}
  - {rounds: [1, 2], machine: first}
"""


def states(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "provenance.yaml").write_text(text, encoding="utf-8")
    return folder


def test_a_run_without_the_file_states_nothing(tmp_path: Path) -> None:
    assert stated_in(tmp_path) == NOTHING_STATED
    assert NOTHING_STATED.command("train-burst") is None
    assert NOTHING_STATED.reason("train-burst", "commit") is None


def test_commands_and_reasons_belong_to_the_trials_they_name(tmp_path: Path) -> None:
    stated = stated_in(states(tmp_path, WHOLE))
    assert stated.command("train-ring-s1") == "burst run ring.yaml"
    assert stated.command("train-burst-s1") == "burst run all.yaml"
    assert stated.reason("train-burst-s1", "gpu") == "measured before records kept the driver"
    assert stated.reason("train-ring-s1", "gpu") is None
    assert stated.reason("train-ring-s1", "commit") == "its commit is gone"


def test_a_round_has_the_machine_of_the_first_entry_that_names_it(tmp_path: Path) -> None:
    stated = stated_in(states(tmp_path, WHOLE))
    assert [stated.machine("train-ring-s1", number) for number in (1, 2, 3)] == ["first", "second", ""]
    assert [stated.machine("train-burst-s1", number) for number in (1, 2)] == ["first", "first"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("commands: burst run a.yaml", "unknown key commands in provenance.yaml; did you mean command?"),
        ("reasons: [{abuot: gpu, says: x}]", "unknown key reasons.abuot; did you mean about?"),
        ("reasons: [{about: divers, says: x}]", "paths, trials or conditions; did you mean driver?"),
        ("machines: [{rounds: [0], machine: x}]", "machines.rounds is 0; expected a round's number, from 1"),
        ("machines: [{rounds: [], machine: x}]", "machines.rounds is an empty list; expected at least one"),
        ("machines: [{rounds: [1]}]", "machines lacks machine; add what is missing"),
        ("reasons: [{about: gpu}]", "reasons lacks says; add what is missing"),
        ("reasons: [{about: [], says: x}]", "about is an empty list"),
        ("reasons: [{about: gpu, says: x, trials: []}]", "trials is an empty list"),
        ("reasons: its commit is gone", "reasons is 'its commit is gone'; expected a list"),
        ("command: [{trials: a}]", "command lacks command"),
        ("command: 3", "command is 3; expected text"),
        ("", "the provenance.yaml is empty"),
        ("command: a\ncommand: b", "the key command was already given"),
    ],
)
def test_a_mistake_is_an_error_with_its_place_and_the_nearest_name(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(UsageError) as caught:
        stated_in(states(tmp_path, text))
    assert words in str(caught.value)
    assert "provenance.yaml" in str(caught.value)


def test_a_row_falls_back_to_the_stated_command_and_carries_its_caveats(tmp_path: Path) -> None:
    run = states(tmp_path / "run", WHOLE)
    ours, ring = record(), record(method="ring")
    ring.run_command = ["burst", "run", "my own.yaml"]
    for one in (ours, ring):
        write_record(run / "trials" / one.trial_id, one)
    rows = {row["method"]: row for row in read_runs([run])[1]}
    assert rows["burst"]["run_command"] == "burst run all.yaml"
    assert rows["ring"]["run_command"] == "burst run 'my own.yaml'"
    assert (
        rows["burst"]["caveats"]
        == "one round; measured before records kept the driver; its commit is gone; ran on first"
    )
    assert rows["ring"]["caveats"] == "one round; its commit is gone; ran on first"


def test_a_row_says_which_rounds_ran_on_which_machine(tmp_path: Path) -> None:
    stated = stated_in(states(tmp_path, WHOLE))
    told = caveats_of(record(method="ring", rounds=[[0.1], [0.1]]), stated)
    assert told[-1] == "not all rounds ran on one machine: round 1 on first, round 2 on second"
    assert caveats_of(record(rounds=[[0.1], [0.1]]), stated)[-1] == "ran on first"


def test_a_record_shows_one_round_one_step_a_traced_step_and_what_interrupted_it() -> None:
    one = record()
    assert one.measurement is not None
    assert caveats_of(one, NOTHING_STATED) == ["one round"]
    one.measurement.step_seconds = [0.2]
    one.measurement.extra = {"profile": {"of": "measured_step"}}
    one.reason = "measured, and then interrupted"
    one.commit += "-dirty"
    assert caveats_of(one, NOTHING_STATED) == [
        "the code differed from its commit", "one round", "one step", "a measured step is the traced one",
        "measured, and then interrupted",
    ]  # fmt: skip


def test_several_rounds_need_no_caveat_and_clocks_lowered_by_a_fault_do() -> None:
    one = record()
    hot = GpuState(throttle=["sw_power_cap", "hw_thermal_slowdown"])
    one.rounds = [
        Round(number=number, place=1, started_at="2026-01-02T03:04:05Z", wall_seconds=1.0, step_seconds=[0.2])
        for number in (1, 2, 4)
    ]
    assert caveats_of(one, NOTHING_STATED) == []
    one.rounds.append(
        Round(number=3, place=1, started_at="2026-01-02T03:05:05Z", wall_seconds=1.0, step_seconds=[0.2],
              gpus_before=[GpuState(throttle=["sw_power_cap"])], gpus_after=[hot])
    )  # fmt: skip
    assert caveats_of(one, NOTHING_STATED) == ["GPU clocks were lowered (hw_thermal_slowdown)"]


@pytest.mark.parametrize(
    ("rounds", "said"),
    [([[1.0, 1.008], [1.0, 1.010], [1.01, 1.02]], "in every round the last took 0.8% longer than the first or more"),
     ([[1.02, 1.0], [1.04, 1.0]], "in every round the last took 2.0% shorter than the first or more"),
     ([[1.0, 1.008], [1.01, 1.0], [1.0, 1.01]], ""), ([[1.0, 1.001], [1.0, 1.002]], ""), ([[1.0, 1.02]], ""),
     ([[1.0], [1.0]], "")],
)  # fmt: skip
def test_steps_that_change_alike_in_every_round_are_not_steady_and_that_is_said(rounds, said) -> None:
    told = [one for one in caveats_of(record(rounds=rounds), NOTHING_STATED) if one.startswith("steps still")]
    assert told == ([f"steps still changed: {said}"] if said else [])


def test_a_trial_without_figures_has_only_what_is_stated(tmp_path: Path) -> None:
    stated = stated_in(states(tmp_path, WHOLE))
    assert caveats_of(record(status="oom", method="ring"), stated) == ["its commit is gone", "ran on first"]
    assert caveats_of(record(status="oom"), NOTHING_STATED) == []


def test_a_record_whose_warm_up_did_not_settle_says_so() -> None:
    found = record()
    assert found.measurement is not None
    for settled in (True, False):
        found.measurement.extra[WARM_UP] = {"steps": 6, "settled": settled}
        words = "no two warm-up steps in a row took the same time within 1%"
        assert (words in caveats_of(found, NOTHING_STATED)) is not settled


def test_a_record_whose_gpus_ran_out_of_memory_between_steps_says_so() -> None:
    found = record()
    assert found.measurement is not None
    assert not any("memory ran out" in words for words in caveats_of(found, NOTHING_STATED))
    found.measurement.extra[ALLOCATION_RETRIES] = [0, 12]
    words = "a GPU's memory ran out 12 times in the measured steps: it freed cached blocks and waited"
    assert words in caveats_of(found, NOTHING_STATED)

"""Records that are JSON and wrong inside: every reader lists them all in a sentence, and sets them aside when asked."""

import copy
import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.reader import to_json
from harness.cli import main
from harness.machine.this_machine import Machine
from harness.plan.matrix import plan
from harness.records.record import read_record, write_record
from harness.report.results import row_of
from harness.run.directory import RunDirectory
from harness.spec.experiment import load_experiment
from tests.harness import synthetic_records
from tests.harness.run.test_run_experiment import ScriptedLauncher
from tests.harness.synthetic_records import leave_record
from tests.published import stored_records

EXPERIMENT = """\
task: attention
model: tiny
fixed: {method: burst, dtype: fp32}
sweep: {seq_len: [256, 512, 1024]}
steps: {warmup: 0, measured: 1}
"""
MISSING = object()


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def traced(**wrong: Any) -> tuple[str, Any]:
    """The extras of a profiled trial with a value that no trace has."""
    profile = {"of": "measured_step", "on": "gpu", "rank": 0, "span_seconds": 0.1, "seconds": {"lm_head": 0.1}}
    return "measurement.extra", {"profile": profile | wrong}


# Dotted key of a record, and a value that no trial leaves there.
DAMAGE: dict[str, tuple[str, Any]] = {
    "seconds in words": ("measurement.step_seconds", ["200 ms"]),
    "seconds as one number": ("measurement.step_seconds", 0.2),
    "seconds below zero": ("measurement.step_seconds", [-1.0]),
    "seconds of nothing": ("measurement.step_seconds", [0]),
    "no seconds": ("measurement.step_seconds", []),
    "not a number": ("measurement.step_seconds", [float("nan")]),
    "beyond all numbers": ("measurement.step_seconds", [float("inf")]),
    "null among numbers": ("measurement.loss", [None]),
    "a huge integer": ("measurement.peak_allocated_bytes", [10**400]),
    "a list for a mapping": ("measurement.extra", []),
    "a mapping for a list": ("hosts", {"node0": 1}),
    "a number for text": ("reason", 7),
    "text for a number": ("wall_seconds", "4.2"),
    "truth for a number": ("attempts", True),
    "an unknown status": ("status", "fine"),
    "an unknown key": ("flops", 1),
    "settings of nothing": ("settings", None),
    "settings as text": ("settings", "burst"),
    "a setting of a wrong type": ("settings.seq_len", "256"),
    "a setting out of range": ("settings.cp_size", -1),
    "an unknown mask": ("settings.mask", "sideways"),
    "a mask of another length": ("settings.mask", "documents:7,9"),
    "a model in words": ("settings.model", "tiny"),
    "deep nesting": ("measurement.extra", {"a": deep(60)}),
    "half a character": ("reason", "\ud800"),
    "a text without end": ("title", "x" * 200_000),
    "no schema": ("schema", MISSING),
    "another schema": ("schema", {}),
    "no trial id": ("trial_id", MISSING),
    "no settings": ("settings", MISSING),
    "no measurement of an ok trial": ("measurement", None),
    "no steps": ("measurement.step_seconds", MISSING),
    "seconds beyond all years": ("measurement.step_seconds", [1e308]),
    "an extra number for a system": ("measurement.extra", {"upstream": 3}),
    "a system's builds as a list": ("measurement.extra", {"upstream": {"release": "x 1", "builds": ["x"]}}),
    "a system's number in words": ("measurement.extra", {"upstream": {"printed": {"tflops": "x"}}}),
    "a trace as text": ("measurement.extra", {"profile": "x"}),
    "a trace in words": traced(seconds={"lm_head": "x"}),
    "a trace of a list": traced(of=["x"]),
    "a trace of nothing": traced(of=None),
    "a trace beyond all years": traced(span_seconds=1e308),
    "a trace below zero": traced(seconds={"lm_head": -0.1}),
    "an error of a list": ("measurement.extra", {"error": {"dq": [None]}}),
    "an error as a number": ("measurement.extra", {"error": 0.1}),
    "an error in words under its column's name": ("measurement.extra", {"error.dq": "x"}),
    "a place without its error": ("measurement.extra", {"error_at": {"dq": {"rank": 0}}}),
    "a place in words": ("measurement.extra", {"error_at": {"dq": {"rank": "0", "error": 0.1}}}),
    "a check of no number": ("measurement.extra", {"checked": {"tokens": "all"}}),
    "bytes of fractions": ("measurement.extra", {"computed_sent_bytes": [0.5]}),
    "a speed of a link in words": ("measurement.extra", {"link_gib_per_second": {"before": "fast"}}),
    "GEMMs of a list": ("measurement.extra", {"gemm_tflops": {"query": [700.0]}}),
    "a time of GEMMs as a number": ("measurement.extra", {"gemm": {"started_at": 7}}),
    "repeated allocations as a number": ("measurement.extra", {"allocation_retries": 3}),
    "memory in words": ("measurement.extra", {"held_gib": "little"}),
}
WHOLE = {
    "a list": "[]",
    "null": "null",
    "a number": "3",
    "half a file": '{"schema": 1',
    "nothing": "",
    "nested without end": "[" * 100_000,
    "digits without end": '{"schema": ' + "1" * 5000 + "}",
    "no text": "\udcff",
}


def damaged(content: dict[str, Any], key: str, value: Any) -> str:
    content = copy.deepcopy(content)
    *owners, name = key.split(".")
    place = content
    for owner in owners:
        place = place[owner]
    if value is MISSING:
        del place[name]
    else:
        place[name] = value
    return json.dumps(content)


@pytest.fixture
def finished(tmp_path, monkeypatch):
    """A finished run of three trials in ./run."""
    monkeypatch.chdir(tmp_path)
    Path("exp.yaml").write_text(EXPERIMENT)
    trials = plan(load_experiment("exp.yaml"), Machine(hostname="here", device="cpu", cores=2, memory_gib=8.0))
    directory = RunDirectory(Path("run"))
    for trial in trials:
        leave_record(directory, trial)
    directory.describe(experiment="exp", title="", trials=[trial.id for trial in trials], started_at="2026-01-02")
    return sorted(Path("run").glob("trials/*/record.json"))


@pytest.mark.parametrize("kind", [*DAMAGE, *WHOLE])
def test_no_reader_meets_a_traceback(kind, finished, capsys):
    path = finished[1]
    text = WHOLE[kind] if kind in WHOLE else damaged(json.loads(path.read_text()), *DAMAGE[kind])
    path.write_text(text, encoding="utf-8", errors="surrogateescape")
    for command in (["report", "run"], ["run", "exp.yaml", "--out", "run", "--resume", "--launcher", "local"]):
        assert main(command) == 2, kind
        said = capsys.readouterr().err
        assert "1 record cannot be used" in said
        assert str(path) in said
        assert len(said) < 2500
    # Status derives nothing, so that what can be read but makes no sense is none of its business.
    assert main(["status", "run"]) == (0 if "mask" in kind else 2)
    assert (str(path) in capsys.readouterr().err) == ("mask" not in kind)
    assert main(["status", "--logs", str(path.parent)]) == 2  # there are none, and it says so
    assert path.exists()


WRONG: tuple[Any, ...] = (None, True, -1, 0, 3, 1e308, "", "x", [], ["x"], [None], {}, {"a": 1}, 10**30)


def entries(value: Any, owners: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to every value inside this one."""
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*owners, key)
        yield from entries(item, (*owners, key))


@pytest.mark.parametrize(
    "run",
    [
        "h200x4/lm_head",
        "h200x4/million_tokens",
        "h200x1/one_gpu_systems",
        "h200x2/two_nodes_systems",
        "cpu/attention_masks",
    ],
)
def test_no_damage_to_the_extras_of_a_published_record_ends_in_a_traceback(run, tmp_path, capsys):
    draw = random.Random(run)
    records = [one for name, one in stored_records() if name == run]
    told = 0
    for number in range(6):
        copy_ = tmp_path / str(number)
        for one in draw.sample(records, min(3, len(records))):
            content = json.loads(one.content)
            victim = copy_ / "trials" / one.trial / "record.json"
            victim.parent.mkdir(parents=True)
            victim.write_text(json.dumps(content))
        extra = (content.get("measurement") or {}).get("extra") or {"error": {"dq": 0.1}}
        *owners, key = draw.choice(sorted(entries(extra), key=str))
        place = extra
        for owner in owners:
            place = place[owner]
        place[key] = draw.choice(WRONG)
        if content["measurement"]:
            content["measurement"]["extra"] = extra
        victim.write_text(json.dumps(content))
        for command in ("report", "verify", "compare", "status"):
            arguments = [command, str(copy_), *(["--format", "csv,md"] if command == "report" else [])]
            assert main(arguments) in (0, 1, 2), (owners, key, place[key])
        told += str(victim) in capsys.readouterr().err
    assert told >= 2  # the others are a value that a trial may leave, or one of a system's own


def test_every_published_record_is_read_and_written_without_a_loss():
    for run, one in stored_records():
        written = one.data.get("measurement")
        if written is not None:
            read = one.record().measurement
            assert json.dumps(to_json(read)["extra"]) == json.dumps(written["extra"]), (run, one.trial)


def test_extras_of_a_method_of_ones_own_are_kept_as_they_are(tmp_path):
    own = {"my_ring": {"rounds": [1, 2], "note": "x"}, "my_share": 0.5}
    trial = synthetic_records.record()
    trial.measurement.extra.update(own)
    write_record(tmp_path, trial)
    found = read_record(tmp_path / "record.json")
    assert found.measurement.extra == trial.measurement.extra
    assert {"extra_my_ring.rounds": "[1, 2]", "extra_my_share": 0.5}.items() <= row_of(found).items()


@pytest.mark.parametrize("command", [["report", "run"], ["status", "run"]])
def test_all_bad_records_are_listed_at_once(command, finished, capsys):
    finished[0].write_text("{}")
    os.remove(finished[2])
    os.mkfifo(finished[2])
    assert main(command) == 2
    said = capsys.readouterr().err
    assert "2 records cannot be used" in said
    assert [str(path) in said for path in finished] == [True, False, True]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"[]", "the whole is an empty list; expected a mapping"),
        (b"5", "the whole is 5; expected a mapping"),
        (b"{", "it is no JSON in UTF-8"),
        (b"\xff\xfe", "it is no JSON in UTF-8"),
        (b'{"kind": []}', "kind is an empty list"),
        (b'{"kind": "step", "step": 1, "loss": "low", "seconds": 1}', "loss is 'low'; expected a number"),
        (b'{"kind": "step"}', "the whole lacks step, loss; add what is missing"),
    ],
)
def test_a_damaged_metric_of_a_training_run_is_one_sentence_with_its_line(line, why, tmp_path, capsys):
    (tmp_path / "training.json").write_text('{"config": {"steps": 4}, "started_at": "2026-01-02"}')
    (tmp_path / "metrics.jsonl").write_bytes(b'{"kind": "step", "step": 1, "loss": 2.5}\n\n' + line + b"\n")
    assert main(["status", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"metrics.jsonl holds a line that is no metric (line 3: {why}" in said
    assert said.endswith("); remove that line, which no checkpoint needs\n")


def test_a_report_sets_bad_records_aside_and_goes_on(finished, capsys):
    finished[0].write_text("{}")
    assert main(["report", "run", "--set-aside-bad", "--format", "csv"]) == 0
    assert "is now bad-record.json" in capsys.readouterr().err
    assert finished[0].with_name("bad-record.json").read_text() == "{}"
    assert len(Path("run/results.csv").read_text().splitlines()) == 3
    finished[0].write_text("[]")  # a second one takes no name that is taken
    assert main(["report", "run", "--set-aside-bad", "--format", "csv"]) == 0
    assert finished[0].with_name("bad-record.json").read_text() == "{}"
    assert finished[0].with_name("bad-2-record.json").read_text() == "[]"


def test_a_resumed_run_sets_bad_records_aside_and_runs_their_trials_again(finished, monkeypatch, capsys):
    monkeypatch.setattr("harness.launch.supervisor.LocalLauncher", lambda: ScriptedLauncher({}))
    finished[0].write_text("{}")
    arguments = ["run", "exp.yaml", "--out", "run", "--launcher", "local", "--set-aside-bad", "--mix"]
    assert main(arguments) == 0
    assert "is now bad-record.json" in capsys.readouterr().err
    assert json.loads(finished[0].read_text())["status"] == "ok"
    [kept] = finished[0].parent.glob("attempts/*/bad-record.json")
    assert kept.read_text() == "{}"


@pytest.mark.parametrize(
    "trials",
    ["attention", {"a": 1}, [1], ["../elsewhere"], [""], [".."], [["x"]], None],
    ids=lambda value: repr(value)[:20],
)
def test_a_description_with_wrong_trials_is_one_sentence(trials, finished, capsys):
    path = Path("run", "run.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"trials": trials}))
    assert main(["status", "run"]) == 2
    assert "does not describe a run; run it again with --resume" in capsys.readouterr().err


@pytest.mark.parametrize("length", [10_000, 90_000])
def test_what_a_record_says_neither_steers_nor_floods_the_terminal(length, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    hostile = "\x1b[2J\x9b31m\u202e\x07" + "y" * length
    trial = synthetic_records.record(status="failed", reason=hostile, title=hostile, experiment=hostile)
    directory = RunDirectory(Path("run"))
    write_record(directory.trial(trial.trial_id), trial)
    directory.describe(experiment=hostile, trials=[trial.trial_id], started_at=hostile)
    for command in (["status", "run"], ["report", "run", "--format", "csv,md,tex,html"]):
        assert main(command) == 0
        printed = "".join(capsys.readouterr())
        assert all(character.isprintable() or character == "\n" for character in printed)
        assert max(map(len, printed.splitlines())) < 1500

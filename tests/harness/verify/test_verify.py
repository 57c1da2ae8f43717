"""`burst verify`: what holds passes, and every change to a record, a number, a table or a figure is found and named."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.cli import main
from harness.records.provenance import HOME, private_in
from harness.records.record import Record, Round, write_record
from harness.records.stated import PROVENANCE_FILE
from harness.report.page import write_report
from harness.verify.provenance import CommitHistory
from harness.verify.verdict import verify
from tests.harness.report.test_report import run_of
from tests.harness.synthetic_records import H200, record

STATED = """
command: burst run experiments/quickstart.yaml
reasons:
  - {about: lost_commit, says: made up for a test}
  - {about: [driver, gpu], says: no machine was asked}
"""


def sweep() -> list[Record]:
    return [record(), record(method="ring", cp_size=2, drift=1e-7), record(method="ulysses", status="oom")]


def reported(folder: Path, records: list[Record], *formats: str) -> Path:
    """A run as `burst run` leaves it, with its provenance stated."""
    run_of(folder, records)
    (folder / PROVENANCE_FILE).write_text(STATED, encoding="utf-8")
    write_report([folder], folder, formats or ("csv", "md"))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reported(tmp_path_factory.mktemp("whole") / "run", sweep(), "csv", "md", "tex", "png", "pdf")


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def verified(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["verify", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out + captured.err


def test_a_run_as_it_was_left_holds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = verified(capsys, run)
    assert code == 0, text
    assert "run: 3 records" in text
    assert "all checks hold" in text
    assert "stated: lost_commit, 3 records: made up for a test" in text
    assert "stated: rounds, 2 records: one round" in text


def test_a_folder_that_was_renamed_still_holds(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert verified(capsys, run.rename(run.with_name("renamed")))[0] == 0


def edited(path: Path, change: Callable[[Any], Any]) -> None:
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


PROFILE = {"of": "extra_step", "on": "cpu", "rank": 0, "span_seconds": 1.0, "seconds": {"matmul": 1.0}}

RECORDS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a setting": (lambda one: one["settings"].update(seed=7), "expected the digest of its settings"),
    "an id": (lambda one: one.update(trial_id="train-burst-x"), "expected the name of its folder"),
    "a step": (lambda one: one["measurement"]["step_seconds"].append(0.1), "4 step_seconds; expected steps.measured"),
    "a pass longer than its step": (
        lambda one: one["measurement"].update(forward_seconds=[9.0, 9.0, 9.0]), "no longer than its step"),
    "a pass": (lambda one: one["measurement"]["forward_seconds"].pop(), "one for each of 3 step_seconds"),
    "a rank": (lambda one: one["measurement"]["peak_rss_bytes"].append(1), "expected one per rank, 1"),
    "bytes": (lambda one: one["measurement"].update(sent_bytes=[-1]), "bytes of at least 0"),
    "a loss": (lambda one: one["measurement"]["loss"].pop(), "3 values of loss; expected one per step, 4"),
    "all losses": (lambda one: one["measurement"].update(loss=[]), "0 values of loss; expected one per step, 4"),
    "all norms": (lambda one: one["measurement"].pop("grad_norm"), "0 values of grad_norm; expected one per step, 4"),
    "a warm-up that nothing asked for": (
        lambda one: one["measurement"]["extra"].update(warm_up={"steps": 1, "settled": True}), "steps.settle is not 0"),
    "a norm": (lambda one: one["measurement"].update(grad_norm=[1, 1, 1, -1]), "a norm of at least 0"),
    "a device": (lambda one: one["measurement"].update(device=H200), "'cpu' as in the record"),
    "a wall time": (lambda one: one.update(wall_seconds=0.1), "no less than its steps"),
    "a start": (lambda one: one.update(started_at="yesterday"), "a time in UTC"),
    "another zone": (lambda one: one.update(started_at="2026-01-02T03:04:05+02:00"), "a time in UTC"),
    "a status": (lambda one: one.update(status="oom", reason="too large"), "only an ok or wrong record has figures"),
    "hosts": (lambda one: one.update(hosts=["a", "b"]), "at most one for each of 1 ranks"),
    "no hosts": (lambda one: one.update(hosts=[]), "expected the hosts it ran on"),
    "attempts": (lambda one: one.update(attempts=0), "attempts 0"),
    "software": (lambda one: one["measurement"].update(software={"python": "3.12"}), "no version of torch"),
    "a trace": (
        lambda one: one["measurement"]["extra"].update(profile=PROFILE | {"span_seconds": 2.0}),
        "the sum of its categories",
    ),
    "half a trace": (
        lambda one: one["measurement"]["extra"].update(profile={"span_seconds": 2.0}), "extra.profile lacks of"),
    "a key": (lambda one: one.update(colour="red"), "unknown key colour"),
    "a type": (lambda one: one.update(wall_seconds="long"), "wall_seconds"),
    "a world": (lambda one: one["settings"].update(cp_size=2), "a multiple of cp_size x tp_size"),
    "a path": (lambda one: one["environment"].update(DATA="/home/ada/data"), f"found {HOME}"),
    "a secret": (lambda one: one["environment"].update(HF_TOKEN="abc"), "the variable HF_TOKEN unhidden"),
    "a token": (lambda one: one.update(reason="with hf_" + "a1" * 15), "an access token"),
}  # fmt: skip


def test_task_attention_times_its_forward_by_itself_so_that_may_be_the_longer_one(tmp_path, capsys) -> None:
    one = record(task="attention")
    assert one.measurement is not None
    one.measurement.forward_seconds = [2 * step for step in one.measurement.step_seconds]
    assert verified(capsys, reported(tmp_path / "run", [one]))[0] == 0
    one.measurement.forward_seconds[0] = 0.0
    code, text = verified(capsys, reported(tmp_path / "zero", [one]))
    assert (code, "forward_seconds 0 in a step of" in text) == (1, True), text


def test_a_system_that_prints_no_loss_has_a_complete_record(tmp_path: Path, capsys) -> None:
    one = record(method="torchtitan_upstream")
    assert one.measurement is not None
    one.measurement.loss = one.measurement.grad_norm = []
    one.measurement.extra["upstream"] = {"release": "0.2"}
    code, text = verified(capsys, reported(tmp_path / "run", [one]))
    assert code == 0, text


def test_records_that_were_never_checked_against_float64_are_counted_and_no_failure(tmp_path: Path, capsys) -> None:
    checked, unchecked = (record(task="attention", seq_len=length) for length in (1024, 2048))
    upstream, out_of_memory = record(method="torchtitan_upstream"), record(method="ulysses", status="oom")
    for one in (unchecked, upstream):
        assert one.measurement is not None
        one.measurement.extra = {} if one is unchecked else {"upstream": {"release": "0.2"}}
    assert "float64" not in verified(capsys, reported(tmp_path / "whole", [checked, upstream, out_of_memory]))[1]
    run = reported(tmp_path / "run", [checked, unchecked, upstream, out_of_memory])
    code, text = verified(capsys, run)
    assert code == 0, text
    assert "all checks hold, 1 record not checked against float64" in text
    assert json.loads(verified(capsys, run, "--json")[1])["runs"][0]["float64_unchecked"] == 1


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_that_contradicts_itself_is_found(name, tmp_path, capsys):
    run = reported(tmp_path / "run", [record()])
    change, words = RECORDS[name]
    [path] = run.glob("trials/*/record.json")
    edited(path, change)
    code, text = verified(capsys, run)
    assert code == 1
    assert words in text
    assert "hf_a1" not in text


def rounds(*starts: str) -> list[Round]:
    return [
        Round(number=number, place=1, started_at=start, wall_seconds=20.0, step_seconds=[0.2, 0.21, 0.22])
        for number, start in enumerate(starts, start=1)
    ]


def with_rounds(given: list[Round]) -> Record:
    one = record()
    assert one.measurement is not None
    one.rounds = given
    one.measurement.step_seconds = [second for part in given for second in part.step_seconds]
    one.measurement.forward_seconds = []
    return one


def test_several_rounds_hold_and_are_no_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = reported(tmp_path / "run", [with_rounds(rounds("2026-01-02T03:04:05Z", "2026-01-02T03:05:05Z"))])
    code, text = verified(capsys, run)
    assert code == 0, text
    assert "stated: rounds" not in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"started_at": "2026-01-02T03:04:15Z"}, "expected after the end of round 1"),
        ({"number": 1}, "ascending numbers from 1, each once"),
        ({"place": -1}, "round 2 at place -1"),
        ({"status": "oom"}, "steps exactly where it is ok"),
        ({"step_seconds": [0.2, 0.2]}, "found 6 step_seconds in the measurement; expected those of its rounds one"),
        ({"step_seconds": [0.2, 0.2, 0.2]}, "found 0.21 as number 5 of step_seconds in the measurement; expected 0.2,"),
        ({"wall_seconds": 0.1}, "round 2 of 0.1 s; expected no less than its steps"),
        ({"gpus_before": [{}, {}]}, "GPU states of 2 ranks"),
        ({"started_at": "noon"}, "round 2 started_at 'noon'"),
    ],
)
def test_rounds_that_contradict_the_measurement_are_found(tmp_path, capsys, changes, words):
    run = reported(tmp_path / "run", [with_rounds(rounds("2026-01-02T03:04:05Z", "2026-01-02T03:05:05Z"))])
    [path] = run.glob("trials/*/record.json")
    edited(path, lambda one: one["rounds"][1].update(changes))
    code, text = verified(capsys, run)
    assert (code, words in text) == (1, True), text


def replaced(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new, 1), encoding="utf-8")


def test_a_number_of_results_that_was_changed_is_found_with_the_one_that_the_record_gives(run, capsys):
    text = (run / "results.csv").read_text()
    header, *lines = (line.split(",") for line in text.splitlines()[:2])
    true = lines[0][header.index("step_seconds_median")]
    replaced(run / "results.csv", f",{true},", ",0.108,")
    code, text = verified(capsys, run)
    assert code == 1
    assert "results.csv: found step_seconds_median (the first: 0.108)" in text
    assert f"the row that `burst report {run}` writes (the first: {true})" in text


FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a column": (lambda run: replaced(run / "results.csv", "trial_id,", "id,"), "no column trial_id"),
    "no results": (lambda run: (run / "results.csv").unlink(), "results.csv: found no such file"),
    "ragged results": (lambda run: replaced(run / "results.csv", "\n", ",,\n"), "is no table"),
    "a row": (
        lambda run: (run / "results.csv").write_text(
            "".join((run / "results.csv").read_text().splitlines(keepends=True)[:-1])
        ),
        "found no row",
    ),
    "a record": (lambda run: shutil.rmtree(sorted(run.glob("trials/*ring*"))[0]), "a row without a record"),
    "a table": (lambda run: replaced(run / "tables" / "results.md", "|", "||"), "results.md: tables: found other"),
    "no table": (lambda run: (run / "tables" / "results.tex").unlink(), "results.tex: tables: found no such"),
    "one more table": (lambda run: (run / "tables" / "mine.md").write_text("x"), "a file that no report makes"),
    "a swapped figure": (
        lambda run: shutil.copy(run / "figures" / "speed.png", run / "figures" / "throughput.png"),
        "figures/throughput.png: figures/: found a",
    ),
    "a broken figure": (lambda run: (run / "figures" / "speed.png").write_bytes(b"no"), "found no PNG picture"),
    "a broken drawing": (lambda run: (run / "figures" / "speed.pdf").write_bytes(b"no"), "found no PDF file"),
    "no figure": (
        lambda run: (run / "figures" / "speed.png").rename(run / "figures" / "loss.png"),
        "speed.png: figures/: found no such file"),
    "a plan": (
        lambda run: (run / "run.json").write_text('{"trials": ["train-gone"]}'), "train-gone: schema: found no record"),
    "a broken plan": (lambda run: (run / "run.json").write_text("{}"), "run.json: schema: found no list of trials"),
    "a path in the plan": (
        lambda run: (run / "run.json").write_text('{"trials": [], "at": "/home/ada"}'), f"secrets: found {HOME}"),
    "a reason for nothing": (
        lambda run: (run / PROVENANCE_FILE).write_text(
            STATED + "  - {about: gpu, says: x, trials: gone-*}\n"),
        "gone-*, which no record has as its id"),
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_a_report_would_not_leave_so_is_found(name, run, capsys):
    change, words = FILES[name]
    change(run)
    code, text = verified(capsys, run)
    assert (code, words in text) == (1, True), text


def test_a_trial_that_never_began_may_have_a_reason(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "run.json").write_text('{"trials": ["train-late", "train-gone"]}')
    stated = STATED + "  - {about: trials, trials: train-late, says: the time was over}\n"
    (run / PROVENANCE_FILE).write_text(stated)
    code, text = verified(capsys, run)
    assert (code, "train-gone: schema: found no record" in text, "train-late: schema" in text) == (1, True, False), text
    (run / "run.json").write_text('{"trials": ["train-late"]}')
    code, text = verified(capsys, run)
    assert (code, "stated: trials, 1 planned trial: the time was over" in text) == (0, True), text
    (run / PROVENANCE_FILE).write_text(stated.replace("trials: train-late, ", ""))  # of all that lack a record
    write_report([run], run, ("csv", "md"))
    assert "the time was over" not in (run / "results.csv").read_text()
    assert verified(capsys, run)[0] == 0
    (run / "run.json").unlink()
    code, text = verified(capsys, run)
    assert (code, "which no trial without a record has as its id" in text) == (1, True), text


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("command: burst run experiments/quickstart.yaml\n", "command: found none"),
        ("  - {about: [driver, gpu], says: no machine was asked}\n", "driver: found no version"),
        ("  - {about: lost_commit, says: made up for a test}\n", "lost_commit: found 0123"),
    ],
)
def test_provenance_is_there_or_a_reason_is(tmp_path, capsys, lost, words):
    one = record(gpu=H200, dtype="bf16")
    one.commit = "0123456789" * 4
    run = reported(tmp_path / "run", [one])
    assert verified(capsys, run)[0] == 0
    if "commit" in lost and CommitHistory().absent:
        pytest.skip("not a git checkout")
    replaced(run / PROVENANCE_FILE, lost, "")
    write_report([run], run, ("csv", "md"))
    code, text = verified(capsys, run)
    assert (code, words in text) == (1, True), text


def git(folder: Path, *arguments: str) -> str:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": "A", f"GIT_{role}_EMAIL": "a@b"}
    done = subprocess.run(["git", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "code"
    folder.mkdir()
    git(folder, "init", "--quiet")
    git(folder, "commit", "--allow-empty", "--quiet", "-m", "first")
    return folder


def test_a_commit_is_judged_by_the_history_that_leads_here(repository: Path, tmp_path: Path) -> None:
    first = git(repository, "rev-parse", "HEAD")
    git(repository, "checkout", "--quiet", "--orphan", "elsewhere")
    git(repository, "commit", "--allow-empty", "--quiet", "-m", "second")
    second = git(repository, "rev-parse", "HEAD")
    history = CommitHistory(repository)
    assert history.absent == ""
    assert history.problem(second) == ""
    assert history.problem(first) == "which the history here does not lead to"
    assert history.problem("0" * 40) == "which the repository here does not hold"
    assert history.problem("--all") == "which is no commit's name"
    one = record()
    one.commit = second
    run = reported(tmp_path / "run", [one])
    (run / PROVENANCE_FILE).write_text("command: burst run x.yaml\n")
    write_report([run], run, ("csv", "md"))
    [verdict] = verify(run, history)
    assert (verdict.failures, [gap.check for gap in verdict.stated]) == ([], ["rounds"])
    one.commit = second + "-dirty"
    write_record(run / "trials" / one.trial_id, one)
    write_report([run], run, ("csv", "md"))
    [verdict] = verify(run, history)
    [failure] = verdict.failures
    assert (failure.check, failure.expected) == ("commit", "the code of a commit, unchanged")


def test_without_a_whole_history_commits_are_not_judged_and_it_is_said(repository: Path, tmp_path: Path) -> None:
    outside = CommitHistory(tmp_path)
    assert outside.absent == "no git repository here"
    assert outside.problem("0" * 40) == ""
    git(repository, "commit", "--allow-empty", "--quiet", "-m", "second")
    git(tmp_path, "clone", "--quiet", "--depth=1", f"file://{repository}", "shallow")
    assert "shallow" in CommitHistory(tmp_path / "shallow").absent
    run = reported(tmp_path / "run", [record()])
    [verdict] = verify(run, outside)
    assert verdict.unchecked == ["whether commits are in the history: no git repository here"]
    assert verdict.holds


def test_all_runs_below_a_directory_have_a_line_each(run, tmp_path, capsys):
    reported(tmp_path / "deep" / "er", [record()])
    (tmp_path / "deep" / "er" / "results.csv").unlink()
    code, text = verified(capsys, tmp_path)
    assert code == 1
    lines = text.splitlines()
    assert any(line.startswith("deep/er: 1 record, ") and "1 failure" in line for line in lines)
    assert any(line.startswith("run: 3 records, ") and "all checks hold" in line for line in lines)
    assert lines[-1] == "2 runs: 1 do not hold"


def test_json_says_the_same(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "results.csv").unlink()
    code, text = verified(capsys, run, "--json")
    found = json.loads(text)
    assert (code, found["holds"]) == (1, False)
    [one] = found["runs"]
    assert one["failures"][0] | {"expected": ""} == {
        "place": "results.csv", "check": "results.csv", "found": "no such file", "expected": "",
    }  # fmt: skip
    assert {gap["check"] for gap in one["stated"]} == {"lost_commit", "rounds"}


@pytest.mark.parametrize("place", ["empty", "gone", "file"])
def test_what_is_no_run_is_not_readable(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    code, text = verified(capsys, tmp_path / place)
    assert code == 2
    assert text.count("\n") == 1


def test_a_provenance_file_that_cannot_be_read_is_not_readable(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / PROVENANCE_FILE).write_text("reason: gone")
    code, text = verified(capsys, run)
    assert code == 2
    assert "did you mean reasons?" in text


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("/usr/local/cuda:/opt/home/x:https://a/home/b", []),
        ('"/home/ada/x"', [HOME]),
        ("PATH=/Users/ada", [HOME]),
        ("/root/.cache", [HOME]),
        ("/roots/of/x", []),
        ("-----BEGIN OPENSSH PRIVATE KEY-----", ["a private key"]),
        ("http://ada:pass@proxy:80", ["a password in an address"]),
        ("http://<redacted>@proxy:80", []),
        ("ghp_" + "a" * 36, ["an access token"]),
    ],
)
def test_private_values_are_known_by_kind(text: str, kinds: list[str]) -> None:
    assert private_in(text) == kinds

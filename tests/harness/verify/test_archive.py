"""`burst verify pack`: a run survives packing, any later change is found, and no archive writes where it should not."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cluster.files.archive import unpack_tar
from harness.cli import main
from harness.records.stated import PROVENANCE_FILE
from harness.run.directory import opened_for_writing
from harness.verify import unpacking
from harness.verify.unpacking import SUMS_FILE, sums_of
from tests.harness.synthetic_records import record
from tests.harness.verify.test_verify import STATED, edited, replaced, reported, sweep, verified

PROJECT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reported(tmp_path_factory.mktemp("runs") / "demo", sweep())


@pytest.fixture(scope="module")
def packed(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("packed") / "artifact.tar.gz"
    assert main(["verify", "pack", str(run), "--out", str(out)]) == 0
    return out


def unpack(archive: Path, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    unpack_tar(archive, folder, "give another one")
    return folder / "demo"


def pack_again(folder: Path, out: Path) -> Path:
    with tarfile.open(out, "w:gz") as tar:
        tar.add(folder, folder.name)
    return out


def test_an_archive_holds_on_another_machine(packed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, text = verified(capsys, packed)
    assert code == 0, text
    assert "demo: 3 records" in text
    folder = unpack(packed, tmp_path)
    assert verified(capsys, folder)[0] == 0
    assert {path.name for path in folder.iterdir()} >= {
        "README.md", "LICENSE", "CITATION.cff", "SHA256SUMS", "provenance.yaml", "results.csv", "report.html",
        "tables", "figures", "trials", "environment",
    }  # fmt: skip
    packages = (folder / "environment" / "packages.txt").read_text()
    assert "\nnumpy==" in packages
    assert "/" not in packages
    assert "    burst run experiments/quickstart.yaml  # 3 of 3 records" in (folder / "README.md").read_text()
    checked = subprocess.run(["sha256sum", "--check", "--quiet", SUMS_FILE], cwd=folder, check=False)
    assert checked.returncode == 0


def test_the_command_of_its_readme_draws_it_again(packed, tmp_path, capsys):
    folder = unpack(packed, tmp_path)
    assert main(["report", str(folder), "--out", str(tmp_path / "again")]) == 0
    for name in ("results.csv", "tables/results.md", "tables/comparison.csv", "figures/speed.png"):
        assert (tmp_path / "again" / name).read_bytes() == (folder / name).read_bytes(), name
    assert verified(capsys, folder)[0] == 0


def test_the_same_records_give_the_same_bytes(run: Path, packed: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.tar.gz"
    os.utime(next(run.glob("trials/*/record.json")), (1, 1))
    assert main(["verify", "pack", str(run), "--out", str(again)]) == 0
    assert again.read_bytes() == packed.read_bytes()
    with tarfile.open(again) as tar:
        members = tar.getmembers()
    assert [member.name for member in members] == sorted(member.name for member in members)
    assert {(member.mtime, member.uid, member.uname, member.mode) for member in members} == {(0, 0, "", 0o644)}


def test_packing_changes_nothing_in_the_run_and_overwrites_no_file(run, packed, capsys):
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    content = packed.read_bytes()
    assert main(["verify", "pack", str(run), "--out", str(packed)]) == 2
    assert "exists and is not overwritten" in capsys.readouterr().err
    assert packed.read_bytes() == content
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before


@pytest.mark.parametrize("name", ["copy.tar.gz", "copy.jsonl"])
def test_a_copy_of_a_trials_directory_is_not_packed(name, run, tmp_path, capsys):
    """`burst verify` would fail on it, on another machine."""
    shutil.copytree(run, tmp_path / "demo")
    trial = min((tmp_path / "demo" / "trials").iterdir())
    shutil.copytree(trial, trial.with_name("before"))
    assert main(["verify", "pack", str(tmp_path / "demo"), "--out", str(tmp_path / name)]) == 2
    said = f"makes no sense (its trial_id is {trial.name}, which is not the name of its directory)"
    assert f"before/record.json {said}" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["out.tar.gz", "out.jsonl"])
def test_a_run_that_goes_on_is_not_packed_and_one_that_lacks_trials_says_so(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy, out = shutil.copytree(run, tmp_path / "copy"), tmp_path / name
    trials = sorted(path.name for path in (copy / "trials").iterdir())
    (copy / "run.json").write_text(json.dumps({"trials": trials}))
    with opened_for_writing(copy, resume=True):
        assert main(["verify", "pack", str(copy), "--out", str(out)]) == 2
    assert "is a run that goes on; pack it when it has ended" in capsys.readouterr().err
    assert not out.exists()
    assert main(["verify", "pack", str(copy), "--out", str(out)]) == 0
    printed = capsys.readouterr()
    assert (printed.out.endswith(f": {out}\n"), "note: " in printed.err) == (True, False)
    (copy / "run.json").write_text(json.dumps({"trials": [*trials, "never-ran"]}))
    assert main(["verify", "pack", str(copy), "--out", str(tmp_path / f"again-{name}")]) == 0
    printed = capsys.readouterr()
    assert printed.out.endswith(f"again-{name}, {len(trials)} of {len(trials) + 1} trials\n")
    assert f"again-{name} fails 1 check; burst verify " in printed.err


@pytest.mark.parametrize("name", ["run.zip", "run.gz", "run.tar", "run.json"])
def test_a_name_that_would_say_another_format_is_refused(
    name: str, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", "pack", str(run), "--out", str(tmp_path / name)]) == 2
    assert f"{name}: expected a name that ends with .tar.gz" in capsys.readouterr().err
    assert not (tmp_path / name).exists()


def test_logs_and_traces_are_packed_only_when_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = reported(tmp_path / "demo", [record()])
    [trial] = (run / "trials").iterdir()
    (trial / "logs").mkdir()
    (trial / "logs" / "rank0.log").write_text("step 1")
    (trial / "trace.json.gz").write_bytes(gzip.compress(b"{}"))
    (trial / "attempts" / "1").mkdir(parents=True)
    for options, expected in (((), set()), (("--logs",), {"rank0.log", "trace.json.gz"})):
        out = tmp_path / f"{len(options)}.tar.gz"
        assert main(["verify", "pack", str(run), "--out", str(out), *options]) == 0
        with tarfile.open(out) as tar:
            names = {Path(name).name for name in tar.getnames()}
        assert names & {"rank0.log", "trace.json.gz"} == expected
        assert verified(capsys, out)[0] == 0


SHIFTED: dict[str, Callable[[Path], object]] = {
    "a step in a record": lambda run: edited(
        sorted(run.glob("trials/*burst*/record.json"))[0],
        lambda one: one["measurement"].update(step_seconds=[0.1, 0.1, 0.1])),
    "a number in results.csv": lambda run: replaced(run / "results.csv", "0.2", "0.1"),
    "a record less": lambda run: sorted(run.glob("trials/*ring*/record.json"))[0].unlink(),
    "a swapped figure": lambda run: (run / "figures" / "speed.png").replace(run / "figures" / "throughput.png"),
    "a figure on paper": lambda run: (run / "figures" / "speed.pdf").write_bytes(b"%PDF-1.4 of another run"),
    "a sentence": lambda run: replaced(run / "README.md", "3 records", "9 records"),
    "one more file": lambda run: (run / "trials" / "note.txt").write_text("x"),
    "no sums": lambda run: (run / SUMS_FILE).write_text(""),
    "broken sums": lambda run: replaced(run / SUMS_FILE, "  ", " "),
}  # fmt: skip


@pytest.mark.parametrize("name", SHIFTED)
def test_a_change_after_packing_is_found(name, packed, tmp_path, capsys):
    folder = unpack(packed, tmp_path)
    SHIFTED[name](folder)
    code, text = verified(capsys, pack_again(folder, tmp_path / "changed.tar.gz"))
    assert code == 1
    assert "SHA256SUMS: found" in text


@pytest.mark.parametrize("name", ["a step in a record", "a number in results.csv", "a record less"])
def test_new_sums_do_not_hide_a_changed_number(name, packed, tmp_path, capsys):
    folder = unpack(packed, tmp_path)
    SHIFTED[name](folder)
    (folder / SUMS_FILE).write_text(sums_of(folder))
    code, text = verified(capsys, pack_again(folder, tmp_path / "changed.tar.gz"))
    assert code == 1
    assert "SHA256SUMS: found" not in text
    assert "results.csv: found" in text


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda one: one["environment"].update(HOME="/home/ada"), "a path below a home directory"),
        (lambda one: one.update(reason="with hf_" + "a1" * 15), "an access token"),
        (lambda one: one["environment"].update(PROXY="http://ada:pass@proxy"), "a password in an address"),
    ],
)
def test_private_values_are_never_packed_and_never_shown(tmp_path, capsys, change, kind):
    run = reported(tmp_path / "demo", [record()])
    [path] = run.glob("trials/*/record.json")
    edited(path, change)
    out = tmp_path / "x.tar.gz"
    assert main(["verify", "pack", str(run), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert f"{path} holds {kind}" in error
    assert not out.exists()
    assert not [secret for secret in ("ada", "hf_", "pass@") if secret in error.replace(str(tmp_path), "")]


def test_a_home_directory_that_is_stated_may_be_seen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = reported(tmp_path / "demo", [record()])
    [path] = run.glob("trials/*/record.json")
    edited(path, lambda one: one["environment"].update(DATA="/home/ada/data"))
    (run / PROVENANCE_FILE).write_text(STATED + "  - {about: paths, says: data lies in the author's home}\n")
    out = tmp_path / "x.tar.gz"
    assert main(["verify", "pack", str(run), "--out", str(out)]) == 0
    code, text = verified(capsys, out)
    assert code == 0, text
    assert "stated: paths, 1 record: data lies in the author's home" in text


@pytest.mark.parametrize("place", ["empty", "gone", "several", "linked"])
def test_what_cannot_be_packed_is_refused(tmp_path, capsys, monkeypatch, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    reported(tmp_path / "several" / "demo", [record()])
    linked = reported(tmp_path / "linked", [record()])
    (linked / "run.json").symlink_to("/etc/hostname")
    assert main(["verify", "pack", place]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.glob("*.tar.gz")) == []


def test_an_archive_makes_its_folder_and_one_that_cannot_be_written_to_is_refused(run, tmp_path, capsys):
    assert main(["verify", "pack", str(run), "--out", str(tmp_path / "new" / "deep" / "demo.tar.gz")]) == 0
    assert [path.name for path in (tmp_path / "new" / "deep").iterdir()] == ["demo.tar.gz"]
    (tmp_path / "file").touch()
    capsys.readouterr()
    for place, words in {
        "/proc": "/proc cannot be written to (No such file or directory); give --out another directory",
        "/proc/folder": "/proc/folder cannot be made (No such file or directory); give --out another directory",
        str(tmp_path / "file"): f"{tmp_path / 'file'} is a file; give --out a directory",
    }.items():
        assert main(["verify", "pack", str(run), "--out", f"{place}/demo.tar.gz"]) == 2
        assert capsys.readouterr().err == f"burst: {words}\n"


def test_an_archive_for_a_read_only_file_system_is_refused_with_the_next_step(run: Path) -> None:
    program = f"{sys.executable} -m harness verify pack {run} --out /mnt/demo.tar.gz"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o ro none /mnt && exec {program}"],
        cwd=PROJECT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "unshare" in done.stderr or "mount:" in done.stderr:
        pytest.skip(f"no mount of its own here: {done.stderr.strip()}")
    said = "burst: /mnt cannot be written to (Read-only file system); give --out another directory\n"
    assert (done.returncode, done.stderr[-len(said) :]) == (2, said)


def member(name: str, **values: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for key, value in values.items():
        setattr(info, key, value)
    return info


HOSTILE: dict[str, tuple[list[tarfile.TarInfo], str]] = {
    "above": ([member("demo/../../evil")], "leads outside"),
    "absolute": ([member("/tmp/evil")], "leads outside"),
    "a symbolic link": ([member("demo/x", type=tarfile.SYMTYPE, linkname="/etc")], "is a link"),
    "a file through a link": (
        [member("demo", type=tarfile.SYMTYPE, linkname="/tmp"), member("demo/evil")], "is a link"),
    "a hard link": ([member("demo/x", type=tarfile.LNKTYPE, linkname="/etc/passwd")], "is a link"),
    "a device": ([member("demo/x", type=tarfile.CHRTYPE)], "a device"),
    "a pipe": ([member("demo/x", type=tarfile.FIFOTYPE)], "a device"),
    "twice": ([member("demo/x"), member("demo/./x")], "is there twice"),
    "a file as a folder": ([member("demo/x"), member("demo/x/y")], "cannot be unpacked"),
    "two folders": ([member("a/x"), member("b/x")], "holds 2 entries at its top"),
    "no folder": ([member("x")], "expected one folder"),
    "a control character": ([member("demo/\x1b[2J")], "is no usable name"),
    "a long name": ([member("demo/" + "x" * 250)], "is no usable name"),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_archive_is_refused_and_leaves_nothing(name, tmp_path, capsys, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    members, words = HOSTILE[name]
    archive = tmp_path / "hostile.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for one in members:
            tar.addfile(one, io.BytesIO())
    code, text = verified(capsys, archive)
    assert (code, words in text) == (2, True), text
    assert "\x1b" not in text
    assert {path.name for path in tmp_path.iterdir()} == {"temporary", "hostile.tar.gz"}
    assert list(temporary.iterdir()) == []


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(unpacking, "MAX_BYTES", 1 << 20)
    for name, sizes in (("one", [2 << 20]), ("many", [600 << 10, 600 << 10])):
        archive = tmp_path / f"{name}.tar.gz"
        with tarfile.open(archive, "w:gz") as tar:
            for number, size in enumerate(sizes):
                tar.addfile(member(f"demo/{number}", size=size), io.BytesIO(bytes(size)))
        assert archive.stat().st_size < 10_000
        code, text = verified(capsys, archive)
        assert (code, "1 MiB" in text) == (2, True), text


def test_an_archive_of_too_many_files_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(unpacking, "MAX_FILES", 3)
    archive = tmp_path / "many.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        for number in range(5):
            tar.addfile(member(f"demo/{number}"))
    code, text = verified(capsys, archive)
    assert (code, "holds more than 3 files" in text) == (2, True), text


@pytest.mark.parametrize("option", [[], ["--reference"]])
@pytest.mark.parametrize("name", ["pipe", "/dev/zero", "gone", "x" * 5000])
def test_what_is_no_file_is_no_archive(run, tmp_path, capsys, name, option):
    os.mkfifo(tmp_path / "pipe")
    arguments = [str(run), *option] if option else []
    assert main(["verify", *arguments, str(tmp_path / name)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert len(said) < 1000


@pytest.mark.parametrize("cut", [0, 10, 1000, -1])
def test_half_an_archive_is_not_readable(packed, tmp_path, capsys, cut):
    half = tmp_path / "half.tar.gz"
    half.write_bytes(packed.read_bytes()[:cut])
    code, text = verified(capsys, half)
    assert code == 2
    assert text.count("\n") == 1

"""One run as one file: an archive for a paper's artifact, with figures made anew, environment, and how to check and
redraw it; or a packed run, its records and provenance as JSON lines.

The same records packed by the same software give the same bytes.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import shlex
import shutil
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from engine.atomic import write_atomic
from engine.reader import read_regular
from harness.base.errors import UsageError
from harness.base.writable import make_writable, refuse_foreign
from harness.metrics.hardware import HARDWARE_DIR, hardware_for
from harness.records.packed import BEGINNING, packed
from harness.records.provenance import HOME, PROJECT_ROOT, commit, private_in, version
from harness.records.record import RECORD_FILE, BadRecord, Record, refuse_bad
from harness.records.stated import PROVENANCE_FILE, StatedProvenance
from harness.records.stored import (
    EXPERIMENT_FILE,
    RUN_FILE,
    DirectoryRun,
    StoredRecord,
    StoredRun,
    is_run,
    read_all,
    stored_run,
)
from harness.report.page import read_runs, write_report
from harness.report.results import Row
from harness.verify.unpacking import MAX_BYTES, MAX_FILES, SUMS_FILE, sums_of

_OF_RUN = (RUN_FILE, EXPERIMENT_FILE, PROVENANCE_FILE)
_OF_PROJECT = ("LICENSE", "CITATION.cff")
_LOGS = ("logs/*", "errors/*", "progress.jsonl", "trace.json.gz")  # of a trial
_DRAWN = frozenset({".png", ".pdf"})  # made here, and no text
_SHOWN_FILES = 20


def pack_lines(path: Path, out: Path, *, replace: bool = False) -> Path:
    """Write one run to `out` as a packed run (`harness.records.packed`), whole or not at all.

    Raises UsageError when `out` exists with other contents, unless they are to be replaced, or its folder cannot be
    written to; when no record is there or one cannot be used; and for a private value, as `pack` does.
    """
    run = _run_at(path)
    records: dict[str, Any] = {}
    texts: list[tuple[str, str | None, str]] = []  # label, trial and text of what is packed

    def use(one: StoredRecord, record: Record) -> None:
        _refuse_other_name(one, record)
        records[one.trial] = one.data
        texts.append((str(one.place), one.trial, one.content.decode(errors="replace")))

    refuse_bad(read_all(run.records(), use))
    texts += [(f"{path}: {name}", None, text or "") for name, text in run.texts()]
    _refuse_private(texts, run.stated())
    content = packed(run.header(), records)
    refuse_foreign(out, BEGINNING.decode())
    if os.path.lexists(out) and not replace and _content(out) != content:
        raise UsageError(f"{out} exists with other contents; give --replace to overwrite it, or --out another name")
    make_writable(out.absolute().parent)
    return write_atomic(out, content)


def pack(path: Path, out: Path, *, logs: bool = False) -> Path:
    """Write the archive of one run to `out`, whole or not at all; logs and traces are left out unless asked for.

    Raises UsageError when `out` exists or its folder, which is made, cannot be written to; when no record is there or
    one cannot be used; and for a secret, or a home directory's path that provenance.yaml does not state, in any file:
    each is named with the kind of value.
    """
    if os.path.lexists(out):
        raise UsageError(f"{out} exists and is not overwritten; give --out another name, or rename it")
    run = _run_at(path)
    refuse_bad(read_all(run.records(), _refuse_other_name))
    stated = run.stated()
    make_writable(out.absolute().parent)
    with tempfile.TemporaryDirectory(prefix="burst-archive-") as temporary:
        folder = Path(temporary) / run.name
        if isinstance(run, DirectoryRun):
            _copy(path, folder, logs=logs)
        else:
            _unpack(run, folder)
        _copy_project(folder)
        records, rows = read_runs([folder])
        write_report([folder], folder)
        _describe(folder, records, rows)
        _refuse_private(_texts(folder, path), stated)
        (folder / SUMS_FILE).write_text(sums_of(folder), encoding="utf-8")
        return write_atomic(out, _packed(folder))


def _refuse_other_name(one: StoredRecord, record: Record) -> None:
    """Raise ValueError for a record in another trial's directory, such as a copy of one: `burst verify` fails there."""
    if one.trial != record.trial_id:
        raise ValueError(f"its trial_id is {record.trial_id[:200]}, which is not the name of its directory")


def _copy(run_dir: Path, folder: Path, *, logs: bool) -> None:
    """Records, what describes the run, and logs where asked for; links are not followed."""
    patterns = [*_OF_RUN, f"trials/*/{RECORD_FILE}", *(f"trials/*/{one}" for one in (_LOGS if logs else ()))]
    for pattern in patterns:
        for path in sorted(run_dir.glob(pattern)):
            if path.is_symlink() or not path.is_file():
                raise UsageError(f"{path} is no regular file; replace it, or remove it")
            _copy_file(path, folder / path.relative_to(run_dir))


def _unpack(run: StoredRun, folder: Path) -> None:
    """The records of a packed run, and what its header says of it, as `burst run` leaves them in a directory."""
    refuse_bad([one for one in run.records() if isinstance(one, BadRecord)])
    for one in run.records():
        if isinstance(one, StoredRecord):
            write_atomic(folder / "trials" / one.trial / RECORD_FILE, one.content)
    header = run.header()
    if header.provenance:
        write_atomic(folder / PROVENANCE_FILE, yaml.safe_dump(header.provenance, sort_keys=False, allow_unicode=True))
    if header.plan is not None:
        write_atomic(folder / RUN_FILE, json.dumps(header.plan, indent=1) + "\n")
    if header.experiment:
        write_atomic(folder / EXPERIMENT_FILE, header.experiment)


def _copy_project(folder: Path) -> None:
    for name in _OF_PROJECT:
        if (PROJECT_ROOT / name).is_file():
            _copy_file(PROJECT_ROOT / name, folder / name)


def _copy_file(path: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, target)


def _describe(folder: Path, records: Sequence[Record], rows: Sequence[Row]) -> None:
    """README.md and environment/: what ran, on what, and what the machine that packed it has installed."""
    environment = folder / "environment"
    environment.mkdir()
    ran = json.dumps(_environment(records), indent=1, sort_keys=True) + "\n"
    (environment / "records.json").write_text(ran, encoding="utf-8")
    (environment / "packages.txt").write_text("".join(f"{line}\n" for line in _packages()), encoding="utf-8")
    known = [hardware_for(record.gpu) for record in records]
    for hardware in {one.name for one in known if one is not None}:
        _copy_file(HARDWARE_DIR / f"{hardware}.yaml", environment / "hardware" / f"{hardware}.yaml")
    (folder / "README.md").write_text(_readme(folder.name, records, rows), encoding="utf-8")


def _environment(records: Sequence[Record]) -> dict[str, Any]:
    """Every distinct value of software, hardware and variables, with the number of records that have it."""
    found: dict[str, dict[str, Counter[str]]] = {"software": {}, "hardware": {}, "variables": {}}
    for record in records:
        hosts, ranks = len(set(record.hosts)), record.settings.world_size
        values = {
            "software": record.measurement.software if record.measurement is not None else {},
            "hardware": {"gpu": record.gpu, "hosts": str(hosts), "ranks": str(ranks)},
            "variables": record.environment,
        }
        for kind, texts in values.items():
            for name, text in texts.items():
                found[kind].setdefault(name, Counter())[text] += 1
    return found | {"commits": Counter(record.commit for record in records)}


def _packages() -> list[str]:
    """Names and versions of what is installed here, as `pip freeze` gives them, without addresses."""
    found = {(one.metadata["Name"] or "", one.version) for one in metadata.distributions()}
    return sorted((f"{name}=={release}" for name, release in found if name), key=str.casefold)


def _readme(name: str, records: Sequence[Record], rows: Sequence[Row]) -> str:
    commands = Counter(row["run_command"] or "(not recorded; provenance.yaml says why)" for row in rows)
    listed = "\n".join(f"    {command}  # {count} of {len(rows)} records" for command, count in commands.items())
    statuses = ", ".join(f"{count} {status}" for status, count in Counter(one.status for one in records).items())
    title = " · ".join(dict.fromkeys(record.title or record.experiment for record in records))
    code = f"burst-harness {version()}" + (f", commit {found}" if (found := commit()) else "")
    redrawn = shlex.quote(f"../{name}-redrawn")
    return f"""# {title}

{len(records)} records ({statuses}), packed by {code}. With that version installed:

    burst verify .                       # records, figures, tables, provenance, and SHA256SUMS
    burst report . --out {redrawn}   # draws every table and figure again, from the records alone

The records were made by:

{listed}

`--only TRIAL_ID` behind a command repeats one trial.

| | |
|---|---|
| trials/*/record.json | settings, versions, commit, environment and raw step times of each trial |
| results.csv, tables/, figures/, report.html | what `burst report` makes of them |
| experiment.yaml, run.json | the experiment and the trials it planned, where the run kept them |
| provenance.yaml | what records cannot say themselves, and why, where there is such a thing |
| environment/ | software, hardware and variables of the records; packages.txt: of the machine that packed them |
| SHA256SUMS | for `sha256sum -c` |
"""


def _texts(folder: Path, path: Path) -> Iterator[tuple[str, str | None, str]]:
    """Label, trial (where it is of one) and text of every file below the folder, made of the run at `path`."""
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.suffix not in _DRAWN:
            parts = file.relative_to(folder).parts
            yield str(path.joinpath(*parts)), parts[1] if parts[0] == "trials" else None, _text(file)


def _refuse_private(texts: Iterable[tuple[str, str | None, str]], stated: StatedProvenance) -> None:
    """Raise UsageError that names every text with a private value, by the kind of value alone."""
    found = []
    for label, trial, text in texts:
        if trial is None:  # made of the records
            home_is_stated = any("paths" in one.about for one in stated.reasons)
        else:
            home_is_stated = stated.reason(trial, "paths") is not None
        found += [f"{label} holds {kind}" for kind in private_in(text) if kind != HOME or not home_is_stated]
    if found:
        more = [f"and {len(found) - _SHOWN_FILES:,} more"] if len(found) > _SHOWN_FILES else []
        listed = "".join(f"\n  {line}" for line in [*found[:_SHOWN_FILES], *more])
        raise UsageError(
            "nothing was packed, because private values would leave this machine; run those trials again without "
            f"them, or state about: paths in provenance.yaml where a path may be seen:{listed}"
        )


def _run_at(path: Path) -> StoredRun:
    """Raises UsageError where there is no record."""
    run = stored_run(path)
    if isinstance(run, DirectoryRun) and not is_run(path):
        raise UsageError(
            f"{path} holds no record (trials/*/record.json); name one directory that `burst run` left, or a packed run"
        )
    return run


def _content(path: Path) -> bytes | None:
    """Of a regular file; None for anything else."""
    try:
        return read_regular(path)
    except (OSError, ValueError):
        return None


def _text(path: Path) -> str:
    """What a file says; a packed trace is unpacked, as far as an archive may be large."""
    if path.suffix == ".gz":
        with gzip.open(path) as file:
            return file.read(MAX_BYTES).decode(errors="replace")
    return path.read_text(encoding="utf-8", errors="replace")


def _packed(folder: Path) -> bytes:
    """A .tar.gz of the folder: files in order of their names, without owner, time or machine."""
    files = list(_files(folder))
    size = sum(path.stat().st_size for path in files)
    if size > MAX_BYTES or len(files) > MAX_FILES:
        raise UsageError(
            f"the archive would hold {len(files):,} files of {size >> 20:,} MiB; `burst verify` unpacks at most "
            f"{MAX_FILES:,} of {MAX_BYTES >> 20:,} MiB, so leave out --logs or pack fewer trials"
        )
    content = io.BytesIO()
    with (
        gzip.GzipFile(filename="", fileobj=content, mode="wb", mtime=0) as plain,
        tarfile.open(fileobj=plain, mode="w", format=tarfile.PAX_FORMAT) as tar,
    ):
        for path in files:
            member = tarfile.TarInfo(path.relative_to(folder.parent).as_posix())
            member.size, member.mode, member.mtime = path.stat().st_size, 0o644, 0
            with open(path, "rb") as file:
                tar.addfile(member, file)
    return content.getvalue()


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*"), key=lambda path: path.relative_to(folder).as_posix()):
        if path.is_file():
            yield path

"""Faults put into the product on purpose, one at a time, and the test that catches each.

    python -m tests.mutation.mutants --after          # every fault of mutants.yaml; then the note's table
    python -m tests.mutation.mutants --only ID ...    # some of them
    python -m tests.mutation.mutants --table          # the note's table, of what is in mutants.csv

The tests run in a copy of a commit (HEAD, or `--commit`), never in the working tree. For each fault the files that the
list names run with `-x`, in the selection of `make test`. Results go to mutants.csv after each fault. One that has a
result for the same code and the same fault does not run again, so a run that was broken off goes on. The table is
that of docs/notes/2026-11-24-mutants.md, which is written anew.

A fault is `caught` by the first test that fails with it and passes without it; `caught by the limit` where the tests
did not end in time, which they do without it; else `survived`. `no proof`: that test, or that file, fails without the
fault too.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import hashlib
import importlib.util
import io
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import yaml

from engine.atomic import write_atomic
from engine.reader import from_json
from tests.processes import kill, with_variable

ROOT = Path(__file__).resolve().parents[2]
LIST, RESULTS = Path(__file__).with_suffix(".yaml"), Path(__file__).with_suffix(".csv")
NOTE = ROOT / "docs" / "notes" / "2026-11-24-mutants.md"
BEGIN, END = "<!--mutants-->", "<!--/mutants-->"  # around the table
VARIABLE = "BURST_MUTANT"  # in the environment of every process of one run of tests
SECONDS = 180.0
CAUGHT, LIMIT, SURVIVED, NO_PROOF = "caught", "caught by the limit", "survived", "no proof"
_SHORT = {LIMIT: "limit", SURVIVED: "survived", NO_PROOF: "no-proof"}  # a word each: a note has a limit too
_NOT_THE_CODE = ("docs/", "tests/mutation/mutants.", "tests/mutation/test_mutants.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One fault: in `file` the text `old`, which stands there once, becomes `new`."""

    id: str
    file: str
    old: str
    new: str
    breaks: str  # one sentence
    tests: list[str]  # files that are asked, in this order

    def mutated(self, text: str) -> str:
        """The content of the file with the fault. Raises ValueError unless the old text is there exactly once."""
        if (times := text.count(self.old)) != 1:
            raise ValueError(
                f"{self.id}: {self.file} has its old text {times} times; correct tests/mutation/mutants.yaml"
            )
        return text.replace(self.old, self.new)


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """How one fault ended, before the tests were cut or after."""

    id: str
    when: str  # before, after
    outcome: str
    caught_by: str  # id of the test, as pytest names it
    seconds: str  # of the tests with the fault
    commit: str
    key: str  # of code and fault


def mutants() -> list[Mutant]:
    """The list, in its order. Raises ValueError for an entry that is not one, and for an id that stands there twice."""
    found = [from_json(Mutant, one) for one in yaml.safe_load(LIST.read_text(encoding="utf-8"))]
    if twice := [name for name, count in Counter(one.id for one in found).items() if count > 1]:
        raise ValueError(f"tests/mutation/mutants.yaml has {twice[0]} twice")
    return found


class Copy:
    """A checkout of one commit below a folder of its own."""

    def __init__(self, folder: Path, commit: str) -> None:
        self.path = folder / "tree"
        self._temporary, self._token = folder / "t", secrets.token_hex(8)
        self._temporary.mkdir(parents=True)
        _git(ROOT, "clone", "--quiet", "--shared", "--no-checkout", str(ROOT), str(self.path))
        _git(self.path, "checkout", "--quiet", "--detach", commit)

    @contextlib.contextmanager
    def with_fault(self, mutant: Mutant) -> Iterator[None]:
        """The copy with the fault, until the end of the block."""
        file = self.path / mutant.file
        text = file.read_text(encoding="utf-8")
        try:
            self._write(file, mutant.mutated(text))
            yield
        finally:
            self._write(file, text)

    def test(self, names: Sequence[str], limit: float) -> tuple[int | None, list[str]]:
        """(exit status, ids of the tests that failed) of test files or tests. The status is None past the limit."""
        failed = self.path / ".pytest_cache" / "v" / "cache" / "lastfailed"
        failed.unlink(missing_ok=True)
        environment = {**os.environ, "PYTHONPATH": str(self.path), "TMPDIR": str(self._temporary)}
        environment[VARIABLE] = self._token
        command = [sys.executable, "-m", "pytest", "-x", "-q", *names]
        try:
            done = subprocess.run(
                command, cwd=self.path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=limit, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return None, []
        finally:
            self.end()
        if done.returncode not in (0, 1, 2):  # such as a test file that is not there
            raise RuntimeError(f"pytest {' '.join(names)} exited with {done.returncode}: {done.stdout[-2000:]}")
        found = json.loads(failed.read_text(encoding="utf-8")) if failed.exists() else {}
        return done.returncode, list(found)

    def end(self) -> None:
        """End all processes of tests of this copy that are left."""
        kill(with_variable(VARIABLE, self._token))

    @staticmethod
    def _write(file: Path, text: str) -> None:
        file.write_text(text, encoding="utf-8")
        if file.suffix == ".py":  # bytecode is known by seconds and size, which two faults may share
            Path(importlib.util.cache_from_source(str(file))).unlink(missing_ok=True)


def tried(mutant: Mutant, copy: Copy, limit: float) -> tuple[str, str, float]:
    """(outcome, the test that caught it, seconds)."""
    started = time.monotonic()
    with copy.with_fault(mutant):
        status, failed = copy.test(mutant.tests, limit)
    seconds = time.monotonic() - started
    if status == 0:
        return SURVIVED, "", seconds
    by = failed[0] if failed else ""
    sound, _ = copy.test([by] if by else mutant.tests, limit)
    if sound != 0:
        return NO_PROOF, by, seconds
    return (LIMIT if status is None else CAUGHT), by, seconds


def run(chosen: Sequence[Mutant], *, when: str, commit: str, jobs: int, limit: float) -> list[Result]:
    """Try every fault that has no result yet, `jobs` at a time. Returns the results of all."""
    commit = _git(ROOT, "rev-parse", commit)
    code = _code(commit)
    results = {(one.id, one.when): one for one in read_results()}
    keys = {mutant.id: _key(code, mutant) for mutant in chosen}
    left = [one for one in chosen if (old := results.get((one.id, when))) is None or old.key != keys[one.id]]
    print(f"{len(chosen) - len(left)} of {len(chosen)} faults have a result at {commit[:8]}", flush=True)
    lock, copies, stopped = threading.Lock(), queue.SimpleQueue[Copy](), threading.Event()

    def one(mutant: Mutant) -> None:
        copy = copies.get()
        try:
            outcome, by, seconds = tried(mutant, copy, limit)
        finally:
            copies.put(copy)
        if stopped.is_set():  # its tests were ended, and say nothing
            return
        with lock:
            results[mutant.id, when] = Result(
                id=mutant.id, when=when, outcome=outcome, caught_by=by, seconds=f"{seconds:.1f}", commit=commit[:8],
                key=keys[mutant.id],
            )  # fmt: skip
            write_results(list(results.values()))
            write_note(table(mutants(), read_results()))
            print(f"{mutant.id}  {outcome}  {seconds:.1f} s  {by}", flush=True)

    with tempfile.TemporaryDirectory(prefix="m-", ignore_cleanup_errors=True) as folder:  # short: sockets lie below it
        made = [Copy(Path(folder, str(number)), commit) for number in range(min(jobs, len(left)))]
        for copy in made:
            copies.put(copy)
        pool = ThreadPoolExecutor(jobs)
        try:
            for _ in pool.map(one, left):
                pass
        finally:  # also at Ctrl-C, or where pytest could not be asked
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)
            for copy in made:
                copy.end()
            pool.shutdown()
    return [results[mutant.id, when] for mutant in chosen]


def read_results() -> list[Result]:
    if not RESULTS.exists():
        return []
    with open(RESULTS, encoding="utf-8", newline="") as file:
        return [Result(**row) for row in csv.DictReader(file)]


def write_results(results: Sequence[Result]) -> None:
    """One line for each fault and time, in the order of the list."""
    order = {mutant.id: place for place, mutant in enumerate(mutants())}
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Result)], lineterminator="\n")
    writer.writeheader()
    kept = [one for one in results if one.id in order]
    writer.writerows(asdict(one) for one in sorted(kept, key=lambda one: (one.when != "before", order[one.id])))
    write_atomic(RESULTS, text.getvalue())


def table(listed: Sequence[Mutant], results: Sequence[Result]) -> str:
    """Markdown: each fault with the test file that caught it, before→after where these are two."""
    by_key = {(one.id, one.when): one for one in results}

    def cell(mutant: Mutant, when: str) -> str:
        found = by_key.get((mutant.id, when))
        if found is None:
            return "-"
        file = Path(found.caught_by.partition("::")[0]).name.removesuffix(".py")
        return f"`{file}`" if found.outcome == CAUGHT else f"**{_SHORT[found.outcome]}**"

    lines = ["| id | file | caught by, before→after |", "|---|---|---|"]
    for one in listed:
        before, after = cell(one, "before"), cell(one, "after")
        lines.append(f"| {one.id} | {one.file} | {before}{f'→{after}' if after != before else ''} |")
    counts = []
    for when in ("before", "after"):
        outcomes = Counter(one.outcome for one in results if one.when == when)
        if outcomes:
            counts.append(f"{when}: {', '.join(f'{count} {outcome}' for outcome, count in outcomes.most_common())}")
    return "\n".join([*lines, "", f"{len(listed)} faults; {'; '.join(counts)}."])


def write_note(found: str) -> None:
    """Put the table in its place in the note."""
    text = NOTE.read_text(encoding="utf-8")
    write_atomic(NOTE, f"{text.partition(BEGIN)[0]}{BEGIN}\n{found}\n{END}{text.partition(END)[2]}")


def _code(commit: str) -> str:
    """A digest of the files of a commit on which results depend."""
    lines = _git(ROOT, "ls-tree", "-r", commit).splitlines()
    kept = [line for line in lines if not line.partition("\t")[2].startswith(_NOT_THE_CODE)]
    return hashlib.sha256("\n".join(kept).encode()).hexdigest()


def _key(code: str, mutant: Mutant) -> str:
    fault = json.dumps([code, mutant.file, mutant.old, mutant.new, mutant.tests])
    return hashlib.sha256(fault.encode()).hexdigest()[:12]


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every fault that was tried is caught, else 1."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation.mutants", description="which test catches which fault"
    )
    parser.add_argument("--all", action="store_true", help="try every fault of the list")
    parser.add_argument("--only", nargs="+", metavar="ID", help="try these faults")
    parser.add_argument("--before", action="store_true", help="record the results as those before the tests were cut")
    parser.add_argument("--after", action="store_true", help="record them as those after (default)")
    parser.add_argument("--table", action="store_true", help="write the table of all results into the note")
    parser.add_argument("--commit", default="HEAD", metavar="REV", help="the code and its tests (default: HEAD)")
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="faults at a time, each in its copy (default: 1)"
    )
    parser.add_argument("--limit", type=float, default=SECONDS, metavar="S", help="seconds for the tests of one fault")
    parsed = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM):  # a shell starts programs in its background without the first
        signal.signal(number, signal.default_int_handler)
    listed = mutants()
    if unknown := set(parsed.only or ()) - {one.id for one in listed}:
        parser.error(
            f"no fault is called {', '.join(sorted(unknown))}; the ids are those of tests/mutation/mutants.yaml"
        )
    if parsed.before and parsed.after:
        parser.error("give one of --before and --after")
    if not (parsed.all or parsed.only or parsed.before or parsed.after or parsed.table):
        parser.error("give --all, --only ID, --before, --after or --table")
    found = []
    if parsed.all or parsed.only or parsed.before or parsed.after:
        chosen = [one for one in listed if not parsed.only or one.id in parsed.only]
        when = "before" if parsed.before else "after"
        found = run(chosen, when=when, commit=parsed.commit, jobs=parsed.jobs, limit=parsed.limit)
    write_note(table(listed, read_results()))  # also of a list that has changed since
    print(f"the table is in {NOTE.relative_to(ROOT)}")
    return int(any(one.outcome not in (CAUGHT, LIMIT) for one in found))


if __name__ == "__main__":
    sys.exit(main())

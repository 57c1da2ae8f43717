"""`burst logs`: the output of the ranks of one trial."""

from __future__ import annotations

import argparse
import io
import re
import shutil
import sys
from pathlib import Path
from typing import TextIO

from cluster.files.errors import shown
from cluster.files.filesystem import open_regular
from harness.base.errors import UsageError, nearest, one_of
from harness.run.directory import ROUNDS_DIRECTORY, round_of_files

LISTED = 5  # ids that one sentence names


class LogsCommand:
    help = "print the logs of one trial, rank by rank"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("trial", metavar="TRIAL", help="a trial's directory, or its id (or the id's beginning)")
        parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
        parser.add_argument("--round", type=int, metavar="N", help="of this round (default: the one that ran last)")
        parser.add_argument(
            "--runs", type=Path, default=Path("results", "runs"), metavar="DIR",
            help="where ids are looked up (default: results/runs)",
        )  # fmt: skip

    def run(self, arguments: argparse.Namespace) -> int:
        trial_dir = find_trial(arguments.trial, arguments.runs)
        if arguments.round is not None:
            trial_dir = _round_directory(trial_dir, arguments.round)
        logs = rank_logs(trial_dir)
        if not logs:
            raise UsageError(f"{trial_dir} holds no logs; the trial was refused or has not started, or it is no trial")
        if arguments.rank is not None and arguments.rank not in logs:
            raise UsageError(
                f"{trial_dir} holds no log of rank {arguments.rank}; its ranks are {', '.join(map(str, logs))}"
            )
        for path in logs.values() if arguments.rank is None else [logs[arguments.rank]]:
            with open_regular(path, "log") as raw, io.TextIOWrapper(raw, encoding="utf-8", errors="replace") as file:
                print(shown(f"==> {path} <=="), flush=True)
                if path.stat().st_size == 0:
                    print("(nothing printed)")
                _print_shown(file)
        return 0


def _print_shown(file: TextIO) -> None:
    """The output of a rank, unchanged in a pipe; on a terminal without its control sequences."""
    if not sys.stdout.isatty():
        shutil.copyfileobj(file, sys.stdout)
        return
    for line in file:
        sys.stdout.write(shown(line.replace("\r", "\n").rstrip("\n") + "\n"))


def _round_directory(trial_dir: Path, number: int) -> Path:
    """Where the files of a round lie. Raises UsageError where there is no such round."""
    last = round_of_files(trial_dir)
    if number == last:
        return trial_dir
    earlier = {int(path.name): path for path in (trial_dir / ROUNDS_DIRECTORY).glob("*") if path.name.isdecimal()}
    if number not in earlier:
        there = sorted(earlier.keys() | ({last} if last else set()))
        found = f"those of round {one_of(map(str, there))}" if there else "no round's"
        raise UsageError(f"{trial_dir} holds no logs of round {number}, but {found}; give --round one of them")
    return earlier[number]


def rank_logs(trial_dir: Path) -> dict[int, Path]:
    """Log files of a trial by rank, in order; empty when it has none."""
    named = ((re.fullmatch(r"rank(\d+)", path.stem), path) for path in (trial_dir / "logs").glob("rank*.log"))
    return dict(sorted((int(match[1]), path) for match, path in named if match))


def find_trial(name: str, runs: Path) -> Path:
    """The directory of a trial: `name` is a path, or the start of an id below `runs`. Raises UsageError."""
    if name and (path := Path(name)).is_dir():
        return path
    directories = sorted(path for path in runs.glob("*/trials/*") if path.is_dir())
    found = [path for path in directories if path.name == name] or [
        path for path in directories if path.name.startswith(name)
    ]
    if len(found) == 1:
        return found[0]
    if found:
        listed = ", ".join(map(str, found[:LISTED]))
        raise UsageError(
            f"{name} means {len(found)} trials ({listed}{', ...' if found[LISTED:] else ''}); give one's path"
        )
    if not directories:
        raise UsageError(f"{name} is no directory and {runs} holds no trials; give a trial's path or --runs DIR")
    raise UsageError(f"no trial below {runs} is called {name}; {_next_step(name, directories)}")


def _next_step(name: str, directories: list[Path]) -> str:
    """The nearest id, else all ids if they are few, else the command that lists them."""
    names = list(dict.fromkeys(path.name for path in directories))
    hint = nearest(name, names)
    if hint.startswith("did you mean") or len(names) <= LISTED:
        return hint
    return f"`burst status DIR` lists the trials of a run, such as {one_of(names[:2])}"


COMMAND = LogsCommand()

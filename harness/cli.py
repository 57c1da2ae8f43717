"""The program `burst`: finds its commands, and turns each error into one sentence and an exit code.

0 all well; 1 a trial failed, timed out, was lost or interrupted, or Ray did not start; 2 the user has something to
correct.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from cluster.files.errors import shown_error, shown_value
from harness.base.errors import UsageError
from harness.base.interrupts import interruptible
from harness.commands import Command, all_commands

USAGE = 2
INTERRUPTED = NO_ROOM = 1
READER_LEFT = 128 + signal.SIGPIPE  # as the shell shows a program that the signal ended

_NO_ROOM = frozenset({errno.EDQUOT, errno.EFBIG, errno.ENOSPC})
# Errors of a file system that failed, was mounted anew or denies access: none is a fault of the program.
_NO_ACCESS = frozenset({
    errno.EACCES, errno.EIO, errno.ENODEV, errno.ENOLCK, errno.ENOTCONN, errno.EPERM, errno.EREMOTEIO, errno.EROFS,
    errno.ESHUTDOWN, errno.ESTALE,
})  # fmt: skip
# A file stands where a command makes a folder, or the other way round.
_IN_THE_WAY = frozenset({errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENOTDIR, errno.ENOTEMPTY})


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Raises SystemExit for --help, --version and an unknown argument."""
    if sys.stdout is None:  # closed by the caller; the next file opened would take its place and be printed into
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the process
    typed = list(sys.argv[1:] if argv is None else argv)
    commands = all_commands()
    try:
        arguments = _parse(typed, commands)
        with interruptible():  # SIGHUP and SIGTERM leave a resumable state, as Ctrl-C does
            code = commands[arguments.command].run(arguments)
            sys.stdout.flush()  # here, where an error still has its sentence
        return code
    except UsageError as error:
        return _say(str(error), USAGE)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)
    except BrokenPipeError:
        _discard_output()
        return READER_LEFT
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            name = shown_value(str(error.filename))
            return _say(f"{name}: no file can have so long a name; give another", USAGE)
        if error.errno in _IN_THE_WAY:
            name = shown_value(str(error.filename2 or error.filename))
            return _say(f"{name}: {error.strerror}; move away what stands there, then repeat the command", USAGE)
        if error.errno not in _NO_ROOM | _NO_ACCESS:
            raise
        _discard_output()
        place = f"{error.filename}: " if error.filename else ""
        mend = "make room" if error.errno in _NO_ROOM else "see to that file or its file system"
        return _say(
            f"{place}{error.strerror}; {mend}, then repeat the command (`burst run` and `burst train` with --resume: "
            "what was finished is kept)",
            NO_ROOM,
        )


def _say(sentence: str, code: int) -> int:
    print(f"burst: {shown_error(sentence)}", file=sys.stderr)
    return code


def _discard_output() -> None:
    """Buffered output cannot be written; Python would try once more at its end, and print an error."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Version(argparse.Action):
    """--version; version and commit are looked up only then."""

    def __call__(self, *_: object) -> NoReturn:
        from harness.records.provenance import commit, version

        print(f"burst {version()}" + (f" ({found})" if (found := commit()) else ""))
        raise SystemExit(0)


class _CommandParser(argparse.ArgumentParser):
    """Prints an error as one sentence, without the list of all arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {shown_error(message)}; `{self.prog} --help` lists the arguments\n")


def _parse(typed: list[str], commands: dict[str, Command]) -> argparse.Namespace:
    parser = _CommandParser(
        prog="burst", description="Measure training on extremely long sequences: run, compare and report."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print version and commit")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in commands.items():
        subparser = subparsers.add_parser(
            name, help=command.help, description=command.help, add_help=not command.forwards
        )
        command.configure(subparser)
    if typed and typed[0] in commands and commands[typed[0]].forwards:
        # argparse would claim options among the forwarded arguments, --help first of all.
        return argparse.Namespace(command=typed[0], rest=typed[1:], typed=typed)
    arguments, unknown = parser.parse_known_args(typed, argparse.Namespace(typed=typed))
    if unknown:
        subparsers.choices[arguments.command].error(f"{' '.join(unknown)} is not known")
    return arguments

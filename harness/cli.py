"""The program `burst`: finds its commands, and turns each error into one sentence and an exit code.

0 all well; 1 a trial failed, timed out, was lost or interrupted, or Ray did not start; 2 the user has something to
correct.
"""

from __future__ import annotations

import argparse
import errno
import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence
from typing import NoReturn

from cluster.files.errors import shown_error, shown_value
from harness.base.errors import UsageError, nearest
from harness.base.interrupts import interruptible
from harness.commands import (
    GROUPS,
    RENAMED,
    Command,
    OtherProgram,
    all_commands,
    command_named,
    command_names,
    verbs_of,
)

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
    typed = _renamed(list(sys.argv[1:] if argv is None else argv))
    try:
        command, arguments = _parse(typed)
        with interruptible():  # SIGHUP and SIGTERM leave a resumable state, as Ctrl-C does
            code = command.run(arguments)
            sys.stdout.flush()  # here, where an error still has its sentence
        return code
    except UsageError as error:
        return _say(str(error), USAGE)
    except KeyboardInterrupt as interrupt:  # with a sentence where the command has a next step
        return _say(str(interrupt) or "interrupted", INTERRUPTED)
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


def _renamed(typed: list[str]) -> list[str]:
    """The words with today's name of a command in the place of an earlier one, which is said."""
    if not typed or typed[0] not in RENAMED:
        return typed
    words = RENAMED[typed[0]]
    print(f"burst {typed[0]} is now burst {words}", file=sys.stderr)
    return [*words.split(), *typed[1:]]


def _parse(typed: list[str]) -> tuple[Command, argparse.Namespace]:
    """The command or verb that the first words name, and its arguments."""
    if not typed:
        print(_overview())
        raise SystemExit(0)
    if typed[0] not in command_names():
        if not typed[0].startswith("-"):
            raise UsageError(f"{typed[0]} is no command; {nearest(typed[0], command_names())}")
        _top_parser().parse_args(typed[:1])  # prints help, the version or an error, and exits

    verbs = verbs_of(typed[0])
    words = typed[:2] if verbs.keys() & set(typed[1:2]) else typed[:1]
    command = verbs[words[1]] if words[1:] else command_named(typed[0])
    rest = typed[len(words) :]
    if isinstance(command, OtherProgram):
        # argparse would claim options among the forwarded arguments, --help first of all.
        return command, argparse.Namespace(rest=rest, typed=typed)
    parser = _CommandParser(prog=" ".join(["burst", *words]), description=command.help)
    command.configure(parser)
    if verbs and not words[1:]:
        _list_verbs(parser, verbs)
    arguments, unknown = parser.parse_known_args(rest, argparse.Namespace(typed=typed))
    if unknown:
        parser.error(f"{' '.join(unknown)} is not known{_hint(unknown[0].partition('=')[0], parser)}")
    return command, arguments


def _hint(option: str, parser: argparse.ArgumentParser) -> str:
    """What was meant by an unknown option, in brackets: a key of the file that the command reads, or a similar one."""
    from harness.spec.experiment import SECTIONS
    from harness.spec.setting import SETTINGS

    known = parser._option_string_actions
    key = option.removeprefix("--").replace("-", "_")
    if (
        option.startswith("--")
        and "--set" in known
        and key in {*SECTIONS, *(name.partition(".")[0] for name in SETTINGS)}
    ):
        return f" (what a file sets is given as --set {key}=...)"
    near = nearest(option, known)
    return f" ({near})" if near.startswith("did you mean") else ""


def _overview() -> str:
    """What `burst` alone prints: its commands in groups."""
    names = [", ".join(group) for group, _ in GROUPS]
    width = max(map(len, names))
    lines = [f"  {name:{width}}  {what}" for name, (_, what) in zip(names, GROUPS, strict=True)]
    return "\n".join([*lines, "burst COMMAND --help says more of one, burst --help of each in a line."])


def _top_parser() -> argparse.ArgumentParser:
    """`burst` itself. It imports every command for one line of help each."""
    parser = _CommandParser(
        prog="burst", description="Measure training on extremely long sequences: run, compare and report."
    )
    parser.add_argument("--version", action=_Version, nargs=0, help="print version and commit")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in all_commands().items():
        subparsers.add_parser(name, help=command.help)
    return parser


def _list_verbs(parser: argparse.ArgumentParser, verbs: dict[str, Command]) -> None:
    """Verbs at the end of a command's help, and how a file of such a name is given."""
    columns, indent = shutil.get_terminal_size().columns - 2, max(map(len, verbs)) + 4
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.description = textwrap.fill(parser.description or "", columns)
    listed = [f"verbs, each with --help ({parser.prog} VERB; a file of that name is ./VERB):"]
    for name, verb in verbs.items():
        line = f"  {name}".ljust(indent) + verb.help
        listed.append(textwrap.fill(line, columns, subsequent_indent=" " * indent))
    parser.epilog = "\n".join(listed)

"""`burst data`: build a token store that training reads."""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from harness.base.errors import UsageError


class DataCommand:
    help = "turn text files into a token store for `data:` of experiments and training configurations"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "texts", nargs="+", metavar="TEXT", help="UTF-8 text files, one document each, or python_docs"
        )
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the new store")
        parser.add_argument(
            "--tokenizer", default="bytes", metavar="bytes|FILE",
            help="bytes, or a Hugging Face tokenizer.json (default: bytes)",
        )  # fmt: skip
        parser.add_argument(
            "--validation", type=_fraction, default=0.01, metavar="PART",
            help="part of the tokens held out for evaluation, at the end (default: 0.01)",
        )  # fmt: skip
        parser.add_argument(
            "--replace", action="store_true", help="build anew where a store exists already; that store is moved aside"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from engine.data.store import build_store
        from engine.data.tokenizers import tokenizer_named

        try:
            tokenizer = tokenizer_named(arguments.tokenizer)
        except ValueError as error:
            raise UsageError(str(error)) from error
        _check_place(arguments.out, replace=arguments.replace)
        try:
            with _moved_aside(arguments.out) as moved:
                header = build_store(arguments.texts, arguments.out, tokenizer, arguments.validation)
        except ValueError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG):  # said by main
                raise
            raise UsageError(f"{error.filename} cannot be accessed ({error.strerror}); choose another path") from error
        if moved:
            print(f"the earlier store is now {moved}")
        texts = "1 document" if len(header.documents) == 1 else f"{len(header.documents)} documents"
        print(
            f"{arguments.out}: {header.count:,} tokens of {texts}, {header.validation:,} of them held out; "
            f"tokenizer {header.tokenizer}, vocabulary {header.vocabulary:,}, {header.dtype}"
        )
        return 0


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part from 0 to below 1; give for example 0.01")
    return value


def _check_place(directory: Path, *, replace: bool) -> None:
    """Raises UsageError for a path that holds something else, or a store that is not to be replaced."""
    from engine.data.store import is_store
    from harness.base.writable import make_writable

    make_writable(directory.parent)
    if not os.path.lexists(directory):
        return
    if not is_store(directory):
        raise UsageError(f"{directory} exists and is no token store; give --out a path that does not exist yet")
    if not replace:
        raise UsageError(f"{directory} holds a token store; give --out another path, or --replace to move it aside")


@contextlib.contextmanager
def _moved_aside(directory: Path) -> Iterator[Path | None]:
    """Moves `directory` aside for the block and yields its new path, None where there was none. Undone on an error."""
    from harness.run.directory import free_name

    if not directory.exists():
        yield None
        return
    moved = directory.rename(free_name(directory))
    try:
        yield moved
    except BaseException:
        moved.rename(directory)
        raise


COMMAND = DataCommand()

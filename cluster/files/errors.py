"""What a user did wrong, said in one sentence: what was found, what was expected, and what to do next."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UsageError(ValueError):
    """Bad input from a user: a command line, an experiment, model, hardware or site file.

    The message is one complete sentence; a program prints it without a traceback and exits (`burst` with 2).
    """


def nearest(word: str, choices: Iterable[str]) -> str:
    """End of a sentence about an unknown `word`: its nearest neighbour, or every choice when none comes near."""
    known = list(choices)
    by_folded = {choice.casefold(): choice for choice in known}
    match = difflib.get_close_matches(word.casefold(), by_folded, n=1)
    return f"did you mean {by_folded[match[0]]}?" if match else f"expected {one_of(known)}"


def one_of(choices: Iterable[str]) -> str:
    """The choices as prose: `a`, `a or b`, `a, b or c`."""
    *head, last = [str(choice) for choice in choices]
    return f"{', '.join(head)} or {last}" if head else last

"""Checks that every rank makes for itself, since each host has files of its own, and that end all ranks alike."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any, TypeVar, cast

from engine.distributed import World

_Found = TypeVar("_Found")


def agreed(world: World, check: Callable[[], _Found]) -> _Found:
    """What `check` finds on this rank. Collective.

    Raises ValueError on every rank when it does on one, naming that rank's host unless all have a problem.
    """
    found: _Found | None = None
    problem = ""
    try:
        found = check()
    except ValueError as error:
        problem = str(error)
    answers = cast(list[tuple[str, str]], world.gather((socket.gethostname(), problem)))
    problems = [(host, words) for host, words in answers if words]
    if problems:
        host, words = problems[0]
        raise ValueError(words if len(problems) == len(answers) else f"{host}: {words}")
    return cast(_Found, found)


def check_same(world: World, facts: dict[str, Any]) -> None:
    """Raises ValueError on every rank when a host's facts about the run differ from those of the first. Collective."""
    answers = cast(list[tuple[str, dict[str, Any]]], world.gather((socket.gethostname(), facts)))
    first, expected = answers[0]
    for host, found in answers[1:]:
        for name, value in expected.items():
            if found.get(name) != value:
                raise ValueError(
                    f"the data on {host} are not those on {first} ({name}: {found.get(name)} there, {value} on "
                    f"{first}); give every host the same text or store at the same path"
                )

"""One environment variable with the reason for its value, and how layers of them lie over each other."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from cluster.environment.secrets import shown

Origin = Literal["default", "method", "discovered", "site", "user"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A variable of the environment."""

    name: str
    value: str
    reason: str  # one sentence without a full stop
    origin: Origin = "default"

    def __post_init__(self) -> None:
        # Both come from here or from a reader that has checked them; a wrong one would be a hole in env.sh.
        assert _NAME.fullmatch(self.name), self.name
        assert "\0" not in self.value, self.name


def overlaid(values: Iterable[Value], variables: Mapping[str, str], *, by: str, origin: Origin) -> tuple[Value, ...]:
    """The values with `variables` over them; a replaced one keeps its place, and its reason names what it replaced.

    `by` says whose variables these are, as in "set by the site file".
    """
    result = {value.name: value for value in values}
    for name, text in variables.items():
        ours = result.get(name)
        instead = (
            "" if ours is None or ours.value == text else f", instead of {shown(name, ours.value)} ({ours.reason})"
        )
        result[name] = Value(name=name, value=text, reason=f"{by}{instead}", origin=origin)
    return tuple(result.values())


def variables(values: Iterable[Value]) -> dict[str, str]:
    """Name to value, as a process is given them."""
    return {value.name: value.value for value in values}

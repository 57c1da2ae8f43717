"""One environment variable with the reason for its value; layers of variables; secrets kept out of output and records.

A secret is a variable whose name says so, or a password inside an address.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Origin = Literal["default", "method", "discovered", "site", "user", "file"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Value:
    """A variable of the environment."""

    name: str
    value: str
    reason: str  # one sentence without a full stop
    origin: Origin = "default"

    def __post_init__(self) -> None:
        # Readers have checked both before; a wrong one could run a command from env.sh.
        assert _NAME.fullmatch(self.name), self.name
        assert "\0" not in self.value, self.name


def overlaid(values: Iterable[Value], variables: Mapping[str, str], *, by: str, origin: Origin) -> tuple[Value, ...]:
    """The values with `variables` over them; a replaced one keeps its place, and its reason names what it replaced.

    `by` names their origin, as in "set by the site file".
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
    """Name to value, for a process."""
    return {value.name: value.value for value in values}


REDACTED = "<redacted>"

_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|KEY", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # the user and password of http://user:password@proxy:8080


def is_secret(name: str, value: str) -> bool:
    """True when a part of this variable must not be shown."""
    return bool(_SECRET_NAME.search(name) or _IN_ADDRESS.search(value))


def shown(name: str, value: str) -> str:
    """The value as a table, a log or a record may hold it."""
    return REDACTED if _SECRET_NAME.search(name) else _IN_ADDRESS.sub(REDACTED, value)


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables by name in alphabetical order, with secrets hidden."""
    return {name: shown(name, value) for name, value in sorted(environment.items())}

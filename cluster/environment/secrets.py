"""Keeping secrets out of what is shown and recorded: variables named like one, and passwords inside of addresses."""

from __future__ import annotations

import re
from collections.abc import Mapping

REDACTED = "<redacted>"

_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|KEY", re.IGNORECASE)
_IN_ADDRESS = re.compile(r"(?<=://)[^/@\s]+(?=@)")  # the user and password of http://user:password@proxy:8080


def is_secret(name: str, value: str) -> bool:
    """Whether something of this variable must not be shown."""
    return bool(_NAME.search(name) or _IN_ADDRESS.search(value))


def shown(name: str, value: str) -> str:
    """The value as a table, a log or a record may hold it."""
    return REDACTED if _NAME.search(name) else _IN_ADDRESS.sub(REDACTED, value)


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables by name in alphabetical order, with what is secret about them hidden."""
    return {name: shown(name, value) for name, value in sorted(environment.items())}

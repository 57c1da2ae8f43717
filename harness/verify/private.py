"""What must not leave a machine with a record: secrets, and paths below a user's home."""

from __future__ import annotations

import re
from collections.abc import Mapping

from cluster.environment.value import shown

HOME = "a path below a home directory"
_SECRETS: dict[str, re.Pattern[str]] = {
    "a private key": re.compile(r"-----BEGIN (?:[A-Z]+ )*PRIVATE KEY-----"),
    "an access token": re.compile(
        r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_[A-Za-z0-9]{20,}|AKIA[0-9A-Z]{16}"
        r"|sk-[A-Za-z0-9_-]{20,}|xox[abprs]-[\w-]{10,}|eyJ[\w-]{15,}\.eyJ[\w-]{15,}\.[\w-]+)"
    ),
    "a password in an address": re.compile(r"://[^/@\s:<]+:(?!\d+/)[^@\s<\"']+@"),
}
_HOME = re.compile(r"(?<![\w.~-])(?:/(?:home|Users)/[^/\s\"':;,]+|/root(?=[/\s\"':;,]|$)|[A-Z]:\\+Users\\+\w+)")


def private_in(text: str) -> list[str]:
    """The kinds of private values in a text; a value itself is never repeated."""
    found = [kind for kind, pattern in _SECRETS.items() if pattern.search(text)]
    return found + ([HOME] if _HOME.search(text) else [])


def secret_variables(environment: Mapping[str, str]) -> list[str]:
    """Names of variables whose values a record would hide."""
    return [name for name, value in environment.items() if shown(name, value) != value]

"""One environment variable with the reason for its value; layers of variables; secrets kept out of output and records.

A secret is a variable whose name says so, a password or a token inside an address, or the credentials of a header.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

Origin = Literal["default", "method", "discovered", "site", "user", "file"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, kw_only=True, slots=True)
class Variable:
    """A variable of the environment."""

    name: str
    value: str
    reason: str  # one sentence without a full stop
    origin: Origin = "default"

    def __post_init__(self) -> None:
        # Readers have checked both before; a wrong one could run a command from env.sh.
        assert _NAME.fullmatch(self.name), self.name
        assert "\0" not in self.value, self.name


def overlaid(
    values: Iterable[Variable], variables: Mapping[str, str], *, by: str, origin: Origin
) -> tuple[Variable, ...]:
    """The values with `variables` over them; a replaced one keeps its place, and its reason names what it replaced.

    `by` names their origin, as in "set by the site file".
    """
    result = {value.name: value for value in values}
    for name, text in variables.items():
        ours = result.get(name)
        instead = (
            "" if ours is None or ours.value == text else f", instead of {shown(name, ours.value)} ({ours.reason})"
        )
        result[name] = Variable(name=name, value=text, reason=f"{by}{instead}", origin=origin)
    return tuple(result.values())


def variables(values: Iterable[Variable]) -> dict[str, str]:
    """Name to value, for a process."""
    return {value.name: value.value for value in values}


REDACTED = "<redacted>"

_SECRET_NAME = re.compile(
    r"TOKEN(?!IZ)|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIAL|KEY|WEBHOOK|COOKIE"
    r"|(^|_)(PWD|PASS|PW|PAT|DSN|SAS)$|_AUTH$|PGPASS$|(^|_)AUTHORIZATION$|CONNECTION_?STRING",
    re.IGNORECASE,
)
_NO_SECRET = frozenset({"PWD", "OLDPWD"})  # the shell's folders
# What stands before the @ of http://user:password@proxy:8080. A password may hold @ and /, whatever the standard says;
# without a colon, a / ends the host, and the @ is one of a path.
_IN_ADDRESS = re.compile(r"(?<=://)(?:[^/@\s]+:[^\s,;]*|[^/@\s]+)(?=@)")
# Parameters of a query, or of a connection string, whose value lets its reader in.
_IN_QUERY = re.compile(
    r"(?i)((?:^|[?&;\s#])(?:[\w.-]*(?:token|secret|password|passwd|credential|signature|api[-_]?key|accountkey"
    r"|accesskey|accesskeyid)|sig|key|auth|code|pwd|pass)=)[^&#;\s]+"
)
_IN_HEADER = re.compile(r"(?i)\b((?:bearer|basic|authorization:\s*\w+)\s+)(?=\S*[\d+/=_-])[\w+/=.~-]{8,}")
# Addresses that take messages from whoever knows them; all behind the host's folder is the key.
_WEBHOOK = re.compile(
    r"(?i)(https?://[^/\s]*(?:"
    r"hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/(?:v\d+/)?webhooks"
    r"|webhook\.office(?:365)?\.com/webhookb2|outlook\.office(?:365)?\.com/webhook|chat\.googleapis\.com/v1/spaces"
    r"|api\.telegram\.org/bot|maker\.ifttt\.com/trigger|hooks\.zapier\.com/hooks|logic\.azure\.com(?::\d+)?"
    r"|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot"
    r"|[^/\s]*/(?:[^\s?#]*/)?(?:web)?hooks?(?=/)))[^\s]+"
)
_AS_VALUE = re.compile(  # tokens by the beginning that their issuers give them
    r"\b(?:hf_[A-Za-z0-9]{16,}|gh[pousr]_[A-Za-z0-9]{16,}|github_pat_\w{16,}|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{8,}"
    r"|sk-[\w-]{20,}|AKIA[A-Z0-9]{12,}|ASIA[A-Z0-9]{12,}|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*)"
)


def is_secret(name: str, value: str) -> bool:
    """True when a part of this variable must not be shown."""
    return shown(name, value) != value


def shown(name: str, value: str) -> str:
    """The value as a table, a log or a record may hold it."""
    if name.upper() not in _NO_SECRET and _SECRET_NAME.search(name):
        return REDACTED
    value = _IN_ADDRESS.sub(REDACTED, value)
    for pattern in (_WEBHOOK, _IN_QUERY, _IN_HEADER):
        value = pattern.sub(rf"\g<1>{REDACTED}", value)
    return _AS_VALUE.sub(REDACTED, value)


def redact(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables by name in alphabetical order, with secrets hidden."""
    return {name: shown(name, value) for name, value in sorted(environment.items())}

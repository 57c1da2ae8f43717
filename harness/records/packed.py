"""A run as one file of JSON lines: a header, then one record per line.

    {"burst_run":1,"records":2,"provenance":{"command":"burst run experiments/quickstart.yaml"},"plan":{...}}
    {"trial_id":"attention-burst-s1024-cp1-0a1b2c3d",...}
    {"trial_id":"attention-ring-s1024-cp1-4e5f6a7b",...}

Records stand in ascending order of their trial ids, each as `burst run` wrote it, on one line. The header says how many
follow, so that a file that lost its end is not taken for a whole one. `burst verify pack RUN --out NAME.jsonl` makes
one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from cluster.files.filesystem import open_regular
from cluster.files.reader import Node
from engine.reader import MAX_BYTES, from_json, parse_json, to_json
from harness.base.errors import UsageError

VERSION = 1
SUFFIX = ".jsonl"
_WHAT = "packed run"
BEGINNING = b'{"burst_run":'  # of every packed run, and of no other file of JSON lines
_TRIAL_ID = re.compile(r"\w[\w.+-]{0,199}", re.ASCII)  # it may become the name of a directory


@dataclass(frozen=True, kw_only=True, slots=True)
class RunHeader:
    """The first line: the version of the format, and what describes the run besides its records."""

    burst_run: int
    records: int  # lines that follow
    provenance: dict[str, object] = field(default_factory=dict)  # the keys of provenance.yaml
    plan: dict[str, object] | None = None  # run.json
    experiment: str = ""  # experiment.yaml, the experiment as it was resolved


def is_packed(path: Path) -> bool:
    """Whether a file is a packed run, by its suffix and its first bytes; a file that cannot be read is none."""
    if path.suffix != SUFFIX:
        return False
    try:
        with open_regular(path, _WHAT) as file:
            return file.read(len(BEGINNING)) == BEGINNING
    except (UsageError, OSError):
        return False


def read_header(path: Path) -> RunHeader:
    """The header of a packed run. Raises UsageError that names file and line for a file without a proper one."""
    line = next(read_lines(path), b"")
    if not line.startswith(BEGINNING):
        raise UsageError(
            f'{path}:1: found no header of a packed run; expected a line {{"burst_run": {VERSION}, ...}}, '
            "as `burst verify pack RUN --out NAME.jsonl` writes"
        )
    try:
        if len(line) > MAX_BYTES:
            raise ValueError(f"it is larger than {MAX_BYTES >> 20} MiB")
        data = cast(dict[str, Any], parse_json(line))
        _refuse_repeated_keys(line)
        if data["burst_run"] != VERSION:
            raise ValueError(f"burst_run is {str(data['burst_run'])[:20]}; this version of burst reads {VERSION}")
        header = from_json(RunHeader, data)
    except ValueError as error:
        raise UsageError(f"{path}:1: the header cannot be used ({error}); correct it, or pack the run again") from error
    return header


def read_lines(path: Path) -> Iterator[bytes]:
    """The lines of a regular file with their ends. One of more than MAX_BYTES is cut there and is the last.

    Raises UsageError for what is no readable regular file.
    """
    with open_regular(path, _WHAT) as file:
        try:
            while line := file.readline(MAX_BYTES + 1):
                yield line
                if len(line) > MAX_BYTES:
                    return
        except OSError as error:
            raise UsageError(f"{path}: cannot read the {_WHAT} ({error.strerror}); give a readable file") from error


def trial_id_in(data: object, before: str) -> str:
    """The trial id of a line's JSON value; `before` is that of the line before. Raises ValueError for what is no id, or
    out of order."""
    trial_id = data.get("trial_id") if isinstance(data, dict) else None
    if not isinstance(trial_id, str) or not _TRIAL_ID.fullmatch(trial_id):
        raise ValueError("it has no trial_id of letters, digits, '_', '.', '+' and '-'")
    if trial_id <= before:
        raise ValueError(f"trial_id {trial_id} does not come after {before}; each stands once, in ascending order")
    return trial_id


def packed(header: RunHeader, records: Mapping[str, object]) -> bytes:
    """The file's content; `records` holds the JSON value of each record by its trial id. Raises ValueError for what no
    reader of the file would take."""
    from_json(RunHeader, to_json(header))
    before = ""
    for trial_id in sorted(records):
        before = trial_id_in(records[trial_id], before)
    said = {key: value for key, value in to_json(header).items() if value or key in ("burst_run", "records")}
    lines = [said, *(records[trial_id] for trial_id in sorted(records))]
    return b"".join(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n" for line in lines)


def node_of(value: object, place: str) -> Node:
    """A JSON value as if it had been read from YAML at `place`."""
    if isinstance(value, dict):
        return Node({key: node_of(item, place) for key, item in value.items()}, place)
    if isinstance(value, list):
        return Node([node_of(item, place) for item in value], place)
    return Node(cast(str | int | float | bool | None, value), place)


def _refuse_repeated_keys(line: bytes) -> None:
    """Raise ValueError where a mapping has a key twice, of which a JSON reader would silently drop one."""

    def checked(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        if repeated := sorted({key for key in keys if keys.count(key) > 1}):
            raise ValueError(f"the key {repeated[0][:60]!r} is given twice")
        return dict(pairs)

    json.loads(line, object_pairs_hook=checked)

"""One trial leaves one record: what was asked, where it ran, what came out, and how it ended.

A record is written aside and renamed, so a reader never meets half of one. Derived figures (tokens per second, MFU)
are computed on reading by `harness.metrics`: a corrected formula needs no rerun.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from engine.measurement import Measurement, write_json
from engine.settings import TrialSettings, from_json

SCHEMA = 1
RECORD_FILE = "record.json"

Status = Literal["ok", "oom", "host_oom", "timeout", "hang", "failed", "node_lost", "refused", "interrupted"]
# Outcomes that say something about the method; the others say that something went wrong.
RESULTS: frozenset[str] = frozenset({"ok", "oom", "host_oom", "refused"})


@dataclass(kw_only=True, slots=True)
class Record:
    """Everything known about one finished trial."""

    trial_id: str
    experiment: str  # name of the experiment: the file's stem
    title: str
    settings: TrialSettings
    system: str  # system the method stands for
    status: Status
    reason: str = ""  # one sentence; empty only when status is ok
    measurement: Measurement | None = None
    launcher: str = ""
    hosts: list[str] = field(default_factory=list)
    gpu: str = ""  # GPU name, or "cpu"
    environment: dict[str, str] = field(default_factory=dict)  # rendered variables the workers got, secrets redacted
    command: list[str] = field(default_factory=list)
    commit: str = ""
    started_at: str = ""  # ISO 8601, UTC
    wall_seconds: float = 0.0  # launch to end of the last process, start-up included; in shared ranks, its own turn
    ranks_turn: int = 0  # among the trials that its ranks were given, from 1; 0: it had ranks of its own
    attempts: int = 1
    schema: int = SCHEMA


def write_record(trial_dir: Path, record: Record) -> None:
    """Leave `record.json` in `trial_dir`, atomically."""
    trial_dir.mkdir(parents=True, exist_ok=True)
    write_json(trial_dir / RECORD_FILE, asdict(record))


def read_record(path: Path) -> Record:
    """Read one record. Raises ValueError when the file is not a record this version understands."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["schema"] != SCHEMA:
            raise ValueError(f"schema {data['schema']}")
        data["settings"] = from_json(TrialSettings, data["settings"])
        if data["measurement"] is not None:
            data["measurement"] = Measurement(**data["measurement"])
        return Record(**data)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} is not a record of schema {SCHEMA} ({error}); remove it and run the trial again"
        ) from error


def read_records(run_dir: Path) -> list[Record]:
    """All records below `run_dir`/trials, in order of trial id."""
    return [read_record(path) for path in sorted(run_dir.glob(f"trials/*/{RECORD_FILE}"))]

"""Which fault meets a run at which point of a trial's life, and how its trials end: data, and no test.

A fork server imports what ranks need, the ranks join each other, warm up and measure; then the launcher records the
outcome, and when all trials have ended it writes results.csv and the report.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

TRIALS = (64, 128, 192, 256)  # their lengths, in the order in which they run
_LAUNCHER, _FORK_SERVER = "harness run", "harness.launch.zygote"


@dataclass(frozen=True, kw_only=True)
class Point:
    """A moment of a trial's life, as what a process of the run is about to do; see hook/sitecustomize.py."""

    name: str
    event: str
    names: str
    program: str = _LAUNCHER
    rank: str = ""
    count: int = 1
    after: str = ""  # what is renamed before
    length: int = TRIALS[2]  # of the trial

    def hold_in(self, folder: Path) -> None:
        """Have processes that start from now on held there, where BURST_TEST_HOLD names `folder` to them."""
        asked = {
            "event": self.event,
            "names": self.names.format(trial=f"-s{self.length}-[^/]*"),
            "after": self.after,
            "count": self.count,
            "program": self.program,
            "rank": self.rank,
        }
        (folder / "hold.json").write_text(json.dumps(asked))


POINTS = {
    point.name: point
    for point in (
        Point(name="start", event="write", names=r"{trial}/\.trial\.json\.\d+\.part"),
        # The fork server imports for the first trial that a command runs.
        Point(
            name="import",
            event="open",
            names=r"/torch/(__pycache__/)?__init__\.[^/]*",
            program=_FORK_SERVER,
            length=TRIALS[1],
        ),
        Point(name="join", event="open", names="{trial}/trial.json", program=_FORK_SERVER, rank="0"),
        # After start-up and after each of the four steps, two of them warm-up, rank 0 adds a line of progress.
        Point(name="warm-up", event="write", names="{trial}/progress.jsonl", program=_FORK_SERVER, rank="0", count=2),
        Point(name="measuring", event="write", names="{trial}/progress.jsonl", program=_FORK_SERVER, rank="0", count=4),
        Point(name="record", event="write", names=r"{trial}/\.record\.json\.\d+\.part"),
        # It is also written while trials run, every 30 s.
        Point(
            name="results",
            event="write",
            names=r"/\.results\.csv\.\d+\.part",
            after=f"-s{TRIALS[-1]}-[^/]*/record.json",
        ),
        Point(name="report", event="write", names=r"/\.report\.html\.\d+\.part"),
    )
}


@dataclass(frozen=True)
class Impossible:
    """Why a fault cannot meet a run at a point."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`ends`, by point: the status of each trial when the disturbed command has ended, `-` for no record."""

    name: str
    ends: dict[str, str | Impossible]
    launcher: str = "local"

    def possible(self) -> dict[str, str]:
        """Those of `ends` that are to be tried."""
        return {point: end for point, end in self.ends.items() if isinstance(end, str)}


_NO_RANK = Impossible("no rank runs before the fork server has imported")
_BETWEEN = Impossible("no rank runs between two trials")
_LEFT = Impossible("the launcher ends everything it started before it writes the report")

WORKER = Fault(
    name="worker killed",
    ends={
        "start": _BETWEEN,
        "import": _NO_RANK,
        "join": "ok ok failed ok",
        "warm-up": "ok ok failed ok",
        "measuring": "ok ok failed ok",
        "record": _BETWEEN,
        "results": _BETWEEN,
        "report": _LEFT,
    },
)
FORK_SERVER = Fault(
    name="fork server killed",
    ends={
        "start": "ok ok ok ok",
        "import": "ok failed ok ok",
        "join": "ok ok failed ok",
        "warm-up": "ok ok failed ok",
        "measuring": "ok ok failed ok",
        "record": "ok ok ok ok",
        "results": "ok ok ok ok",
        "report": _LEFT,
    },
)
LAUNCHER = Fault(
    name="launcher killed",
    ends={
        "start": "ok ok - -",
        "import": "ok - - -",
        "join": "ok ok - -",
        "warm-up": "ok ok - -",
        "measuring": "ok ok - -",
        "record": "ok ok - -",
        "results": "ok ok ok ok",
        "report": "ok ok ok ok",
    },
)
# Without a head no trial can be placed; the next command finds Ray started again.
RAY_HEAD = Fault(
    name="Ray's head killed",
    launcher="ray",
    ends={
        "start": "ok ok node_lost node_lost",
        "import": "ok node_lost node_lost node_lost",
        "join": "ok ok node_lost node_lost",
        "warm-up": "ok ok node_lost node_lost",
        "measuring": "ok ok node_lost node_lost",
        "record": "ok ok ok node_lost",
        "results": "ok ok ok ok",
        "report": _LEFT,
    },
)
SUPERVISOR = Fault(
    name="supervisor killed",
    launcher="ray",
    ends={
        "start": "ok ok ok ok",
        "import": "ok node_lost ok ok",
        "join": "ok ok node_lost ok",
        "warm-up": "ok ok node_lost ok",
        "measuring": "ok ok node_lost ok",
        "record": "ok ok ok ok",
        "results": "ok ok ok ok",
        "report": _LEFT,
    },
)
STALL = Fault(
    name="rank stalled",
    ends={
        "start": _BETWEEN,
        "import": "ok hang ok ok",
        "join": "ok ok hang ok",
        "warm-up": "ok ok hang ok",
        "measuring": "ok ok hang ok",
        "record": _BETWEEN,
        "results": _BETWEEN,
        "report": _LEFT,
    },
)
DISK = Fault(name="disk filled", ends=dict(LAUNCHER.ends))
PERMISSIONS = Fault(name="permissions revoked", ends=dict(LAUNCHER.ends))
TORN = Fault(name="record torn", ends=dict.fromkeys(POINTS, "torn ok ok ok"))

# On three hosts of which a trial needs two: the one that is not the head. A trial that starts just then gets another
# host, or is lost with this one.
NETWORK = Fault(
    name="host's network dropped",
    launcher="ray",
    ends={
        "start": "ok ok ok/node_lost ok",
        "import": "ok node_lost ok ok",
        "join": "ok ok node_lost ok",
        "warm-up": "ok ok node_lost ok",
        "measuring": "ok ok node_lost ok",
        "record": "ok ok ok ok/node_lost",
        "results": "ok ok ok ok",
        "report": "ok ok ok ok",
    },
)

FAULTS = (WORKER, FORK_SERVER, LAUNCHER, RAY_HEAD, SUPERVISOR, STALL, DISK, PERMISSIONS, TORN)
# What `make test` tries: the run ends. A killed rank, a file that cannot be written and a torn record have quicker
# tests (tests/harness/run/test_attempt.py, test_run_experiment.py, test_bad_records.py); `make test-faults` tries all.
QUICK = {(LAUNCHER.name, "record")}

"""The published records were written again under the names of today. Beside the files before: names and ids changed.

The table of names stands here and nowhere else. Settings that went are at the value that every run had without them. An
id is the digest of the settings under the names of today.
"""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.settings import TrialSettings, from_json, to_json
from harness.records.stored import runs_below, stored_run
from harness.spec.trial import id_of

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT / "results" / "published"
BEFORE = "af1cec78ebe8af17c36530d743f20307a3b98f25"  # the last commit with the records as recorded

NAMES = {"gradient_wire": "grad_comm_dtype", "head_parts": "num_head_chunks"}
SCHEDULES = {"head_exchange": "ulysses", "heads_inside": "usp", "heads_across": "usp_transposed"}
RECORDED_SCHEDULES = SCHEDULES | {"all_to_all": "ulysses"}
GONE = {
    "repeat_kv_heads": True, "overlap_projections": False, "gather_ahead": 1, "parameters": "auto",
    "between_nodes": "plain",
}  # fmt: skip


# Of a run: trials at the same time, and rounds until an interval is narrow. No run had another value.
GONE_OF_RUNS = {"lanes": 1, "interval": 0.0, "budget_seconds": 600.0}
# Whether ranks ran several trials, which changed none of them: the setting, also in commands. `ranks_turn` stays.
SHARED = re.compile(
    r"\\n  share_ranks: (true|false)"
    r'|,"--set","limits\.share_ranks=true"|,"--set=limits\.share_ranks=true"'
    r"| --set[ =]limits\.share_ranks=true"
)


def went(settings: dict[str, Any]) -> bool:
    """Whether a record is of code that went with it: attention passes as CUDA graphs, transfers with reserves."""
    return settings.get("cuda_graph") == "pass" or settings.get("between_nodes", "plain") != "plain"


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)


def paths_before() -> list[str]:
    found = git("ls-tree", "-r", "--name-only", BEFORE, "results/published").stdout.split()
    return [path for path in found if path.endswith(".jsonl")]


def renamed(values: dict[str, Any]) -> dict[str, Any]:
    return {NAMES.get(name, name): value for name, value in values.items()}


def settings_of_today(recorded: dict[str, Any]) -> dict[str, Any]:
    """The settings as today's reader fills them."""
    found = renamed(recorded)
    found["schedule"] = SCHEDULES.get(found["schedule"], found["schedule"])
    for name, value in GONE.items():
        assert found.pop(name, value) == value
    planned = found.get("planned", "").split()
    found["planned"] = " ".join(name for name in planned if name not in GONE)
    whole: dict[str, Any] = to_json(from_json(TrialSettings, found))
    return whole


def without_gone(values: dict[str, Any]) -> dict[str, Any]:
    assert all(values.get(name, value) == value for name, value in GONE_OF_RUNS.items())
    return {name: value for name, value in values.items() if name not in GONE_OF_RUNS}


def header_of_today(recorded: dict[str, Any]) -> dict[str, Any]:
    found = dict(recorded)
    if "plan" in found:
        found["plan"] = without_gone(found["plan"])
    for name, value in GONE_OF_RUNS.items():
        if "experiment" in found:
            found["experiment"] = found["experiment"].replace(f"\n  {name}: {value}\n", "\n")
    return found


def record_of_today(recorded: dict[str, Any]) -> dict[str, Any]:
    found = without_gone(recorded) | {"settings": settings_of_today(recorded["settings"])}
    if (measured := recorded["measurement"]) is not None:
        resolved = renamed(measured["chosen"])
        if "schedule" in resolved:
            resolved["schedule"] = RECORDED_SCHEDULES.get(resolved["schedule"], resolved["schedule"])
        if "estimate" in resolved:
            words = resolved["estimate"].split(" ")
            resolved["estimate"] = " ".join(RECORDED_SCHEDULES.get(word, word) for word in words)
        found["measurement"] = measured | {"chosen": resolved}
    return found


def ids_of_today(recorded: list[dict[str, Any]]) -> dict[str, str]:
    """The id of today by the recorded one, of all trials of a run."""
    ids = {
        one["trial_id"]: id_of(from_json(TrialSettings, settings_of_today(one["settings"])))
        for one in recorded
        if not went(one["settings"])
    }
    assert len(set(ids.values())) == len(ids)  # no two trials became one
    return ids


def with_ids(value: Any, ids: dict[str, str]) -> Any:
    """A JSON value with the ids of today wherever its texts name a trial."""
    return json.loads(re.sub("|".join(map(re.escape, ids)), lambda found: ids[found[0]], json.dumps(value)))


@cache
def lines_before(path: str) -> list[str]:
    return SHARED.sub("", git("show", f"{BEFORE}:{path}").stdout).splitlines()


@pytest.mark.skipif(git("cat-file", "-e", f"{BEFORE}^{{commit}}").returncode != 0, reason="a copy without the history")
def test_runs_differ_from_those_before_in_names_and_ids_alone() -> None:
    compared = 0
    for path in paths_before():
        header, *lines = lines_before(path)
        if "burst_run" not in json.loads(
            header
        ):  # of errors on CPU ranks: no record of a run, and measured again since
            continue
        recorded = [json.loads(line) for line in lines]
        ids = ids_of_today(recorded)
        today = {one.trial: one.data for one in stored_run(ROOT / path).records()}
        for before in recorded:
            if went(before["settings"]):
                assert before["trial_id"] not in today
                continue
            now = today.pop(ids[before["trial_id"]])
            settings = to_json(from_json(TrialSettings, now["settings"]))  # with what was added since
            expected = with_ids(record_of_today(before), ids)
            assert now | {"settings": settings} == expected, (path, before["trial_id"])
            compared += 1
        assert not today, path
        head = json.loads((ROOT / path).read_text(encoding="utf-8").splitlines()[0])
        expected = header_of_today(json.loads(header))
        if len(ids) < len(recorded):  # trials went, with their part of the experiment, as one more reason says
            kept = [trial for trial in expected["plan"]["trials"] if trial in ids]
            expected |= {"records": len(ids), "plan": expected["plan"] | {"trials": kept}}
            expected["experiment"] = head["experiment"]
            expected["provenance"]["reasons"].append(head["provenance"]["reasons"][-1])
        assert head == with_ids(expected, ids), path
    assert compared > 600


def test_no_record_has_an_old_name() -> None:
    for run in map(stored_run, runs_below(PUBLISHED)):
        for one in run.records():
            resolved = (one.data["measurement"] or {}).get("chosen", {})
            assert not (NAMES.keys() | GONE.keys()) & one.data["settings"].keys(), one.place
            assert not NAMES.keys() & resolved.keys(), one.place
            assert resolved.get("schedule") not in RECORDED_SCHEDULES, one.place

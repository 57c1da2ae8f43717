"""The targets that are shipped, and the table of what was found of each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conform.matrix import ON_GPUS, matrix_lines
from conform.target import load, target_names, variant_of

RESULTS = Path(__file__).parents[2] / "results" / "conform"


@pytest.mark.parametrize("name", target_names())
def test_every_target_is_read_without_the_system_that_it_calls(name: str) -> None:
    target = load(name)
    assert target.ranks
    assert not target.missing or target.install, "what is not installed names its command"
    packages = [word for word in target.install.partition("pip install")[2].split() if not word.startswith("-")]
    assert all("==" in word for word in packages), "each package at a version"


def test_a_variant_that_a_file_has_not_is_refused_with_those_that_it_has() -> None:
    assert variant_of("conform_target_native:ulysses", ("ring", "ulysses")) == "ulysses"
    assert variant_of("conform_target_native", ("ring", "ulysses")) == "ring"
    with pytest.raises(ValueError, match="variant 'rings' is unknown; choose one of ring, ulysses"):
        variant_of("conform_target_native:rings", ("ring", "ulysses"))


def test_every_committed_report_is_of_a_target_and_its_failures_are_in_the_table() -> None:
    lines = "\n".join(matrix_lines(RESULTS))
    names = {name.replace(":", "-") for name in target_names()}
    for path in RESULTS.rglob("*.json"):
        report = json.loads(path.read_text(encoding="utf-8"))
        assert path.stem in names, path.name
        name = report["target"] + (ON_GPUS if path.parent.name == "cuda" else "")
        assert f"| {name} | `{report['version']}` | {report['passed']} of {report['claimed']} |" in lines
        silent = sum(case["status"] == "not claimed" for case in report["cases"])
        assert report["claimed"] + silent == len(report["cases"])
        for case in report["cases"]:
            assert (case["status"] in ("passed", "not claimed")) or f"{case['name']} (" in lines


def test_a_report_of_other_cases_or_another_schema_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "not_run.yaml").write_text("{}", encoding="utf-8")
    report = json.loads(next(RESULTS.glob("*.json")).read_text(encoding="utf-8"))
    for changed, found in (
        ({"schema": "burst-conform/0"}, "has schema burst-conform/0, expected burst-conform/1"),
        ({"cases": report["cases"][1:]}, "has other cases than there are now"),
    ):
        (tmp_path / "one.json").write_text(json.dumps(report | changed), encoding="utf-8")
        with pytest.raises(ValueError, match=found):
            matrix_lines(tmp_path)

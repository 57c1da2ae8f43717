"""The list of faults (tests/mutation/mutants.yaml) fits the tree: each one applies, changes it and can be imported."""

from __future__ import annotations

import yaml

from tests.mutation.mutants import NOTE, ROOT, mutants, read_results, table

LISTED = mutants()


def test_every_fault_applies_once_and_leaves_a_file_that_can_be_read() -> None:
    for mutant in LISTED:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        mutated = mutant.mutated(text)  # raises where the old text is not there exactly once
        assert mutated != text, mutant.id
        if mutant.file.endswith(".py"):
            compile(mutated, mutant.file, "exec")
        elif mutant.file.endswith(".yaml"):
            yaml.safe_load(mutated)


def test_every_fault_is_one_of_the_product_and_names_test_files_that_are_there() -> None:
    for mutant in LISTED:
        assert mutant.file.partition("/")[0] in ("engine", "harness", "cluster", "baselines"), mutant.id
        assert mutant.tests, mutant.id
        assert [file for file in mutant.tests if not (ROOT / file).is_file()] == [], mutant.id
        assert mutant.breaks.endswith("."), mutant.id


def test_the_list_is_spread_over_the_packages() -> None:
    packages = [mutant.file.partition("/")[0] for mutant in LISTED]
    assert len(LISTED) >= 60
    least = {"engine": 20, "harness": 15, "cluster": 10, "baselines": 5}
    assert all(packages.count(package) >= number for package, number in least.items())


def test_the_note_has_the_table_of_the_results() -> None:
    results = read_results()
    assert {one.id for one in results} <= {mutant.id for mutant in LISTED}
    assert table(LISTED, results) in NOTE.read_text(encoding="utf-8")

"""results/paper: the numbers of others are complete, and rows and descriptions belong together."""

import csv
from pathlib import Path

import yaml

PAPER = Path(__file__).parents[2] / "results" / "paper"
with open(PAPER / "reference.csv", encoding="utf-8", newline="") as file:
    ROWS = list(csv.DictReader(file))
EXPERIMENTS = yaml.safe_load((PAPER / "experiments.yaml").read_text(encoding="utf-8"))["experiments"]


def test_every_published_row_belongs_to_a_described_experiment_and_names_its_source():
    assert {row["experiment"] for row in ROWS} == {experiment["id"] for experiment in EXPERIMENTS}
    assert all(row["source"] for row in ROWS)


def test_a_published_value_is_a_number_or_a_reason():
    for row in ROWS:
        if row["unit"] == "oom":
            assert row["value"] == "", row
        else:
            assert float(row["value"]) > 0 or row["metric"].endswith("_std"), row


def test_corrected_utilisation_is_the_plotted_one_without_the_slip_of_1024():
    keys = ("experiment", "gpus", "model", "seq_len", "method")
    values = {(*(row[key] for key in keys), row["metric"]): row["value"] for row in ROWS if row["unit"] != "oom"}
    pairs = [(key, value) for key, value in values.items() if key[-1] == "mfu_as_plotted"]
    assert pairs
    for key, value in pairs:
        corrected = float(values[*key[:-1], "mfu_corrected"])
        assert abs(float(value) / corrected - 1.024) < 2e-3, key

"""Records as rows, and results.csv."""

from __future__ import annotations

import csv
import dataclasses
import json
import random
from pathlib import Path

from engine.lora import Lora
from engine.settings import Checkpoint, to_json
from harness.records.record import read_record, write_record
from harness.report.results import COLUMNS, flatten, row_of, rows_of, write_results
from tests.harness.synthetic_records import cpu_sweep, gpu_sweep, record

CONTRACT = (
    "trial_id, experiment, task, method, system, model, seq_len, world_size, cp_size, dp_size, nodes, gpu, dtype, "
    "status, reason, samples, step_seconds_median, step_seconds_iqr, forward_seconds_median, "
    "tokens_per_gpu_per_second, tflops_per_gpu, mfu, mfu_ceiling, hfu, peak_memory_gib, peak_reserved_gib, "
    "sent_gib_per_gpu, loss, grad_norm, seed, commit, ran, rounds, step_seconds_low, step_seconds_high, "
    "tokens_per_gpu_per_second_low, tokens_per_gpu_per_second_high, driver, gpus, run_command, ceiling_source, caveats"
)


def read(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def test_the_columns_of_the_contract_come_first_and_in_order() -> None:
    assert ", ".join(COLUMNS) == CONTRACT


def test_every_setting_has_a_column(tmp_path: Path) -> None:
    lora = Lora(rank=2, alpha=4.0, targets=("q", "v"))
    chosen = {
        "memory": "80GiB",
        "host_memory": "9GiB",
        "planned": "checkpoint.tail",
        "lora": lora,
        "optimizer_states": "8bit",
        "gradient_offload": True,
    }
    trial = record(checkpoint=Checkpoint(every=1, tail=0.0, plan="auto"), lm_head_fusion=False, **chosen)
    [written] = read(write_results(tmp_path / "results.csv", rows_of([trial])))
    assert written["lora"] == "rank 2, alpha 4, q v"
    settings = flatten(to_json(dataclasses.replace(trial.settings, lora=None)))
    del settings["model.note"]  # words, no setting
    assert settings.pop("model.name") == written["model"]
    assert settings.keys() <= written.keys()
    assert written["checkpoint.tail"] == "0.0"
    assert written["lm_head_fusion"] == "false"
    assert written["steps.measured"] == "3"
    assert written["model.kv_heads"] == "4"


def test_a_budget_of_memory_has_a_column_where_a_trial_has_one(tmp_path: Path) -> None:
    by_hand, budgeted = record(), record(memory="80GiB")
    [alone] = read(write_results(tmp_path / "results.csv", rows_of([by_hand])))
    assert "memory" not in alone
    beside = read(write_results(tmp_path / "results.csv", rows_of([by_hand, budgeted])))
    assert sorted(row["memory"] for row in beside) == ["", "80GiB"]


def test_a_record_from_before_a_setting_existed_is_read_with_what_every_run_was_then(tmp_path: Path) -> None:
    trial = record(checkpoint=Checkpoint(every=2))
    write_record(tmp_path, trial)
    path = tmp_path / "record.json"
    data = json.loads(path.read_text(encoding="utf-8"))
    del data["settings"]["checkpoint"]["replay"]
    path.write_text(json.dumps(data), encoding="utf-8")
    assert read_record(path) == trial
    assert row_of(read_record(path))["checkpoint.replay"] == "hold"


def test_what_auto_became_stands_beside_what_was_asked(tmp_path: Path) -> None:
    [written] = read(write_results(tmp_path / "results.csv", rows_of([record(kernel="auto")])))
    assert (written["kernel"], written["chosen_kernel"], written["chosen_layout"]) == ("auto", "cpu", "zigzag")


def test_an_absent_number_is_an_empty_cell_with_status_and_reason(tmp_path: Path) -> None:
    trial = record(status="oom", reason="rank 0 ran out of memory")
    [written] = read(write_results(tmp_path / "results.csv", rows_of([trial])))
    derived = COLUMNS[COLUMNS.index("samples") : COLUMNS.index("seed")]
    assert {written[name] for name in derived} == {""}
    assert (written["status"], written["reason"]) == ("oom", "rank 0 ran out of memory")


def test_no_cell_is_ever_nan(tmp_path: Path) -> None:
    written = read(write_results(tmp_path / "results.csv", rows_of([*cpu_sweep(), *gpu_sweep()])))
    cells = {cell for row in written for cell in row.values()}
    assert len(cells) > 50
    assert not {cell for cell in cells if cell == "None" or "nan" in cell.lower()}


def test_numbers_survive_the_file_with_all_digits(tmp_path: Path) -> None:
    row = row_of(record(seconds=1 / 3))
    [written] = read(write_results(tmp_path / "results.csv", [row]))
    assert float(written["step_seconds_median"]) == row["step_seconds_median"]


def test_reasons_with_commas_quotes_and_newlines_stay_in_one_cell(tmp_path: Path) -> None:
    reason = 'found "a", expected b;\nnext: do c'
    [written] = read(write_results(tmp_path / "results.csv", rows_of([record(status="failed", reason=reason)])))
    assert written["reason"] == reason


def test_rows_that_differ_only_in_an_ablation_do_not_look_alike() -> None:
    one, other = row_of(record(schedule="ring")), row_of(record(schedule="double_ring"))
    assert {name for name in one if one[name] != other[name]} == {"trial_id", "schedule"}


def test_order_does_not_depend_on_the_order_of_finishing() -> None:
    sweep = gpu_sweep()
    expected = [row["trial_id"] for row in rows_of(sweep)]
    random.Random(7).shuffle(sweep)
    assert [row["trial_id"] for row in rows_of(sweep)] == expected
    assert rows_of(cpu_sweep())[0]["method"] == "burst"


def test_nodes_count_the_emulated_ones_and_are_absent_when_nothing_ran() -> None:
    assert row_of(record(emulate_nodes=2, cp_size=2))["nodes"] == 2
    assert row_of(record(status="refused"))["nodes"] is None


def test_a_rewrite_leaves_one_whole_file_and_nothing_beside_it(tmp_path: Path) -> None:
    write_results(tmp_path / "results.csv", rows_of(cpu_sweep()))
    write_results(tmp_path / "results.csv", rows_of([record()]))
    assert [path.name for path in tmp_path.iterdir()] == ["results.csv"]
    assert len(read(tmp_path / "results.csv")) == 1

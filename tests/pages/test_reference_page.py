"""The tables of docs/reference.md, docs/train.md and docs/plan.md are those of the code."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import typing
from pathlib import Path

import pytest
import yaml

from cluster.environment.ranks import process_values, trial_values
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from engine.training.config import TrainingConfig
from harness.cli import main
from harness.commands import all_commands
from harness.launch.environment import RECORDED_PREFIXES, rank_environment
from harness.metrics.hardware import SPEEDS, Hardware
from harness.records.judging import BOUNDS
from harness.records.record import Status
from harness.report.results import COLUMNS
from harness.report.tables.particular import HEADERS
from harness.spec.experiment import Limits, Search
from harness.spec.models import MODELS_DIR, load_model
from harness.spec.setting import SETTINGS, leaf_types
from harness.training.file import load_training
from tests.command_help import burst_help

DOCS = Path(__file__).parents[2] / "docs"
REFERENCE = (DOCS / "reference.md").read_text(encoding="utf-8")

Line = list[str]  # the cells of one line of a table


def section(title: str, page: str = REFERENCE) -> str:
    """The text below a heading, up to the next one of the same or a higher level."""
    found = re.search(rf"^(#+) {re.escape(title)}\n(.*?)(?=^#{{1,2}} |\Z)", page, re.MULTILINE | re.DOTALL)
    assert found, title
    return found[2]


def lines_of(text: str) -> list[Line]:
    """All lines of all tables of a text, but for headings and rulers."""
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows]


def by_name(text: str) -> dict[str, Line]:
    """Lines of tables by each name in code style of their first cell."""
    return {name: line for line in lines_of(text) for name in re.findall(r"`([^`]+)`", line[0])}


def named(text: str) -> set[str]:
    return set(by_name(text))


MODEL_KEYS = section("Model files") + section("Keys", (DOCS / "hybrids.md").read_text(encoding="utf-8"))

# Commands


def options_in(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text))


def options_of(cell: str) -> set[str]:
    """Options of a cell, and of the shared ones that it names."""
    shared = {line[0].strip("*"): line[1] for line in lines_of(section("Commands")) if line[0].startswith("*")}
    inner = [options_of(shared[name]) for name in re.findall(r"\*([a-z ]+)\*", cell)]
    return options_in(cell).union(*inner)


COMMANDS = {line[0].strip("`"): line[2] for line in lines_of(section("Commands")) if line[0].startswith("`burst ")}


@pytest.mark.parametrize("usage", COMMANDS)
def test_the_options_of_a_command_are_those_of_its_help(usage: str) -> None:
    words = [word for word in usage.split()[1:] if word.islower()]
    text = burst_help(" ".join(words))
    assert text is not None
    listed = text[text.index("\n\n") :]  # not the usage
    offered = {
        one for line in listed.splitlines() if re.match(r" {2,4}-", line) for one in options_in(line.split("  ")[1])
    }
    assert options_of(COMMANDS[usage]) == offered - {"--help"}


def test_every_command_is_listed() -> None:
    assert {usage.split()[1] for usage in COMMANDS} == all_commands().keys()


# Experiments and settings

SETTINGS_TABLE = section("Settings").partition("### ")[0]


def test_every_key_of_an_experiment_is_listed() -> None:
    inner = {"steps": Steps, "limits": Limits, "search": Search}
    keys = {f"{name}.{key}" for name, cls in inner.items() for key in leaf_types(cls)}
    others = {
        "steps.rounds",
        "name",
        "title",
        "task",
        "model",
        "sweep",
        "fixed",
        "exclude",
        "seeds",
        "scales",
        "reference.paper",
    }
    assert named(section("Experiment files")) >= keys | others


def test_every_setting_is_listed_and_no_other() -> None:
    elsewhere = {name for name in SETTINGS if name.startswith(("model.", "steps."))} | {"task"}
    rows = by_name(SETTINGS_TABLE)
    assert rows.keys() == SETTINGS.keys() - elsewhere
    fields = {f"model.{one.name}" for one in dataclasses.fields(ModelShape)}
    assert by_name(MODEL_KEYS).keys() >= fields


def test_every_value_that_a_setting_accepts_is_named() -> None:
    rows = by_name(SETTINGS_TABLE)
    for name, hint in (typing.get_type_hints(TrialSettings) | _inner("checkpoint", Checkpoint)).items():
        if typing.get_origin(hint) is typing.Literal and name in rows:
            missing = [value for value in typing.get_args(hint) if f"`{value}`" not in rows[name][1] + rows[name][2]]
            assert missing == [], name


def _inner(prefix: str, cls: type) -> dict[str, typing.Any]:
    return {f"{prefix}.{name}": hint for name, hint in typing.get_type_hints(cls).items()}


def default_in(cell: str) -> object:
    """The value at the beginning of a cell: a number, a truth value or a word."""
    text = re.split("[:;]", cell)[0].strip("`")
    with contextlib.suppress(ValueError):
        return float(text)
    return yaml.safe_load(text)


def test_defaults_are_those_of_the_code() -> None:
    fields = {one.name: one.default for one in dataclasses.fields(TrialSettings)}
    fields |= {f"checkpoint.{one.name}": one.default for one in dataclasses.fields(Checkpoint)}
    fields |= {f"model.{one.name}": one.default for one in dataclasses.fields(ModelShape)}
    rows = by_name(MODEL_KEYS) | by_name(SETTINGS_TABLE)  # both have `parameters`
    in_words = {
        "memory",
        "host_memory",
        "model.rope_base",
        "model.norm_eps",
        "model.note",
    }  # all, two in one line, the file's
    compared = {name for name in rows.keys() & fields.keys() if fields[name] is not dataclasses.MISSING} - in_words
    assert {name: default_in(rows[name][2]) for name in compared} == {name: fields[name] for name in compared}
    steps = by_name(section("Experiment files"))
    assert steps["steps.warmup"][2] == f"{Steps().warmup}, {Steps().measured}"
    assert default_in(steps["steps.rounds"][2]) == 1


# Records


def test_every_status_is_listed_and_no_other() -> None:
    assert named(section("Statuses")) == set(typing.get_args(Status))


def test_every_column_of_results_csv_is_listed_and_no_other() -> None:
    assert named(section("results.csv")) == set(COLUMNS)


def test_every_category_of_a_traced_step_is_listed_in_its_order() -> None:
    found = [name for line in lines_of(section("Where a step's time goes")) for name in re.findall(r"`(\w+)`", line[0])]
    assert found == list(HEADERS)


def test_the_bounds_of_errors_are_those_that_records_are_judged_by() -> None:
    rows = lines_of(section("Errors against float64"))[1:]
    dtypes = ("fp64", "fp32", "bf16")
    for bound in BOUNDS:
        row = next(
            line for line in rows if line[0] == bound.task and ("loss" in line[1]) == (bound.tensors == ("loss",))
        )
        cell = row[2 + dtypes.index(bound.dtype)]
        found = re.findall(r"\d+e-\d+", cell)[-1 if bound.kernel else 0]
        assert float(found) == bound.error, bound


# Environment


def test_every_variable_of_the_ranks_is_listed() -> None:
    given = {value.name for device in ("cpu", "cuda") for value in process_values(device=device, cores=8, ranks=2)}
    given |= {value.name for value in trial_values("logs")}
    of_a_rank = rank_environment(1, ranks=2, port=1, emulate_nodes=2).keys()
    given |= {name for name in of_a_rank if name.startswith("NCCL_")}  # the others are torchrun's
    text = section("Environment variables")
    assert given <= named(text)
    assert all(f"`{prefix}*`" in text for prefix in RECORDED_PREFIXES)


# Training runs, models, hardware files


def test_every_key_of_a_training_run_is_listed_and_the_example_is_one(tmp_path: Path) -> None:
    page = (DOCS / "train.md").read_text(encoding="utf-8")
    rows = by_name(section("Settings", page))
    own = typing.get_type_hints(TrainingConfig)
    for key in own.keys() - {"settings"}:
        inner = [one.name for one in dataclasses.fields(own[key])] if dataclasses.is_dataclass(own[key]) else []
        assert [name for name in inner if name not in rows[key][1]] == [], key
    example = tmp_path / "mine.yaml"
    example.write_text(page.partition("```yaml\n")[2].partition("```")[0], encoding="utf-8")
    assert load_training(example, ["data=python_docs"]).config.settings.cp_size == 2  # its store is not built here


def test_the_models_of_the_page_have_the_sizes_of_their_files() -> None:
    pages = ((DOCS / name).read_text(encoding="utf-8") for name in ("train.md", "hybrids.md"))
    rows = by_name("".join(section("Models", page).partition("### ")[0] for page in pages))
    shapes = {path.stem: load_model(path) for path in MODELS_DIR.glob("*.yaml")}
    assert rows.keys() >= shapes.keys()
    for name, shape in shapes.items():
        mlp = f"{shape.ffn}" if shape.gated else f"{shape.ffn}, not gated"
        sizes = [shape.layers, shape.hidden, mlp, f"{shape.heads} : {shape.kv_heads}", shape.vocab]
        unit, by = ("B", 1e9) if shape.parameters > 1e9 else ("M", 1e6)
        assert rows[name][1:] == [*map(str, sizes), f"{shape.parameters / by:.2f}{unit}"]


def test_every_key_of_a_hardware_file_is_listed() -> None:
    text = section("Hardware files", (DOCS / "plan.md").read_text(encoding="utf-8"))
    assert named(text) == {one.name for one in dataclasses.fields(Hardware)} - {"name"} | set(SPEEDS)


def test_the_answer_that_the_page_of_planning_shows_is_the_one_of_its_command() -> None:
    page = (DOCS / "plan.md").read_text(encoding="utf-8")
    [command] = re.findall(r"^burst (plan --model .*?) +#", page, re.MULTILINE)
    table = page.partition("cp_size  checkpoint.mlp")[2].partition("```")[0].splitlines()[1:]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main([*command.split(), "--json"]) == 0
    found = [
        [
            str(row["cp_size"]), f"{row['checkpoint.mlp']:#.3g}", str(row["checkpoint.host_layers"]),
            f"{row['optimizer_offload']:#.3g}" if row["optimizer_offload"] else "False",
            *(f"{row[name]:.3g}" for name in ("predicted_seconds", "predicted_gpu_gib")),
        ]
        for row in json.loads(out.getvalue())
    ]  # fmt: skip
    assert [line.split()[:6] for line in table] == found

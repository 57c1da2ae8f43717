"""An experiment file becomes an Experiment, or one sentence that says where and why not."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.settings import Steps
from harness.base.errors import UsageError
from harness.spec.experiment import Experiment, load_experiment

PAGE = Path(__file__).parents[3] / "docs" / "experiments.md"

BASE = """\
title: A question
task: train
model: tiny
sweep:
  method: [burst, ulysses]
  seq_len: [1k, 2k]
fixed: {dtype: fp32, batch_size: 1}
steps: {warmup: 2, measured: 5}
seeds: [0]
scales:
  smoke: {sweep: {seq_len: [256]}, fixed: {dtype: bf16}, exclude: []}
"""


def _write(folder: Path, text: str) -> Path:
    path = folder / "question.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def _load(folder: Path, text: str = BASE, scale: str | None = None, *overrides: str) -> Experiment:
    return load_experiment(_write(folder, text), scale, overrides)


def test_a_file_is_read_into_typed_values(tmp_path: Path) -> None:
    experiment = _load(tmp_path)
    assert (experiment.name, experiment.title, experiment.tasks) == ("question", "A question", ("train",))
    assert experiment.sweep == {"method": ("burst", "ulysses"), "seq_len": (1024, 2048)}
    assert experiment.fixed["model"].name == "tiny"
    assert {key: value for key, value in experiment.fixed.items() if key != "model"} == {
        "dtype": "fp32",
        "batch_size": 1,
    }
    assert experiment.steps == Steps(warmup=2, measured=5)
    assert experiment.seeds == (0,)


def test_a_scale_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    experiment = _load(tmp_path, BASE, "smoke")
    assert experiment.sweep == {"method": ("burst", "ulysses"), "seq_len": (256,)}
    assert (experiment.fixed["dtype"], experiment.fixed["batch_size"]) == ("bf16", 1)
    assert experiment.scale == "smoke"


def test_overrides_lie_over_the_scale_in_their_order(tmp_path: Path) -> None:
    overrides = ("sweep.seq_len=[4k]", "fixed.dtype=fp64", "fixed.dtype=fp32", "steps.measured=1", "seeds=[1, 2]")
    experiment = _load(tmp_path, BASE, "smoke", *overrides)
    assert experiment.sweep["seq_len"] == (4096,)
    assert experiment.fixed["dtype"] == "fp32"
    assert experiment.steps == Steps(warmup=2, measured=1)
    assert experiment.seeds == (1, 2)


def test_a_later_layer_may_fix_what_was_swept_and_sweep_what_was_fixed(tmp_path: Path) -> None:
    experiment = _load(tmp_path, BASE, None, "fixed.seq_len=4k", "sweep.dtype=[fp32, bf16]", "sweep.model=[tiny, 1b]")
    assert experiment.fixed["seq_len"] == 4096
    assert list(experiment.sweep) == ["method", "dtype", "model"]
    assert "dtype" not in experiment.fixed
    assert "model" not in experiment.fixed
    assert [model.name for model in experiment.sweep["model"]] == ["tiny", "1b"]
    again = _load(tmp_path, BASE, None, "sweep.model=[tiny, 1b]", "model=1b")
    assert "model" not in again.sweep
    assert again.fixed["model"].name == "1b"


def test_dotted_and_nested_keys_mean_the_same(tmp_path: Path) -> None:
    dotted = _load(tmp_path, BASE.replace("dtype: fp32,", "checkpoint.tail: 0, model.layers: 1,"))
    nested = _load(tmp_path, BASE.replace("dtype: fp32,", "checkpoint: {tail: 0}, model: {layers: 1},"))
    assert dotted.fixed == nested.fixed
    assert dotted.fixed["checkpoint.tail"] == 0.0
    swept = _load(tmp_path, BASE, None, "sweep.checkpoint.tail=[0, 1]")
    assert swept.sweep["checkpoint.tail"] == (0.0, 1.0)


def test_an_inline_model_is_a_shape(tmp_path: Path) -> None:
    inline = "model: {layers: 1, hidden: 64, ffn: 128, heads: 4, kv_heads: 2, head_dim: 16, vocab: 256}"
    experiment = _load(tmp_path, BASE.replace("model: tiny", inline))
    assert (experiment.fixed["model"].name, experiment.fixed["model"].layers) == ("inline", 1)
    assert _load(tmp_path, BASE.replace("model: tiny", inline), None, "model.layers=3").fixed["model"].layers == 3


@pytest.mark.parametrize("below", [(), ("model=1b",), ("sweep.model=[tiny, 1b]",)])
def test_a_field_of_a_model_that_has_a_name_is_set_as_below_fixed(tmp_path: Path, below: tuple[str, ...]) -> None:
    short, full = (_load(tmp_path, BASE, None, *below, f"{key}=3") for key in ("model.layers", "fixed.model.layers"))
    assert short == full
    assert short.fixed["model.layers"] == 3
    with pytest.raises(UsageError, match=r"--set model.layer=3: unknown setting model.layer in fixed; did you mean"):
        _load(tmp_path, BASE, None, *below, "model.layer=3")


@pytest.mark.parametrize("text", ["1e-3", "0.001", "1.0e-3"])
def test_floats_are_read_however_they_are_written(tmp_path: Path, text: str) -> None:
    assert _load(tmp_path, BASE.replace("batch_size: 1", f"learning_rate: {text}")).fixed["learning_rate"] == 1e-3


def test_exclude_takes_lists_as_any_of(tmp_path: Path) -> None:
    experiment = _load(tmp_path, BASE + "exclude: [{method: [ulysses], seq_len: [1k, 2k], model: tiny, seed: 0}]\n")
    assert experiment.exclude == ({"method": ("ulysses",), "seq_len": (1024, 2048), "model": ("tiny",), "seed": (0,)},)


def test_what_is_left_out_takes_the_defaults_of_the_settings(tmp_path: Path) -> None:
    experiment = _load(tmp_path, "task: [train, attention]\nmodel: tiny\nfixed: {method: burst, seq_len: 1k}\n")
    assert experiment.title == "question"
    assert experiment.tasks == ("train", "attention")
    assert (experiment.steps, experiment.seeds, experiment.sweep) == (Steps(), (0,), {})
    assert experiment.limits.trial_seconds == 0


def test_rounds_are_read_from_steps_at_every_scale_and_are_no_part_of_what_a_trial_runs(tmp_path: Path) -> None:
    text = BASE.replace("measured: 5}", "measured: 5, rounds: 3}")
    experiment = _load(tmp_path, text)
    assert (experiment.steps, experiment.rounds) == (Steps(warmup=2, measured=5), 3)
    assert _load(tmp_path, text, "smoke").rounds == 3
    changed = text.replace("exclude: []}", "exclude: [], steps: {rounds: 1}}")
    assert _load(tmp_path, changed, "smoke").rounds == 1
    assert _load(tmp_path, changed, "smoke", "steps.rounds=4").rounds == 4
    assert _load(tmp_path).rounds == 1


def test_a_name_of_its_own_replaces_that_of_the_file(tmp_path: Path) -> None:
    assert _load(tmp_path, BASE.replace("title: A question", "name: another")).name == "another"


WRONG = [
    # what stands in the base file, what replaces it, what the sentence says
    ("sweep:", "sweeps:", r":4: unknown key sweeps in the experiment; did you mean sweep\?"),
    ("dtype: fp32", "dtyp: fp32", r":7: unknown setting dtyp in fixed; did you mean dtype\?"),
    ("  method:", "  methods:", r":5: unknown setting methods in sweep; did you mean method\?"),
    ("burst, ulysses", "burst, ulises", r":5: unknown method ulises; did you mean ulysses\?"),
    ("dtype: fp32", "dtype: fp16", r":7: dtype is 'fp16'; expected fp64, fp32 or bf16"),
    ("dtype: fp32", "dtype: 32", r":7: dtype is 32; expected fp64, fp32 or bf16"),
    ("dtype: fp32", "dtype: [fp32]", r":7: dtype is a list; .* under sweep.dtype"),
    ("dtype: fp32", "dtype:", r":7: dtype is empty; expected fp64, fp32 or bf16"),
    ("batch_size: 1", "batch_size: 0", r":7: batch_size is 0; give a number of at least 1"),
    ("batch_size: 1", "optimizer_states: 4bit", r":7: optimizer_states is '4bit'; expected 8bit or null"),
    ("batch_size: 1", "batch_size: one", r":7: batch_size is 'one'; expected a whole number"),
    ("batch_size: 1", "batch_size: 1.5", r":7: batch_size is 1.5; expected a whole number"),
    ("batch_size: 1", "batch_size: true", r":7: batch_size is true; expected a whole number"),
    ("batch_size: 1", "learning_rate: .nan", r":7: learning_rate is nan; expected a finite number"),
    ("batch_size: 1", "learning_rate: .inf", r":7: learning_rate is inf; expected a finite number"),
    ("batch_size: 1", "learning_rate: -1", r":7: learning_rate is -1.0; give a number above 0"),
    ("batch_size: 1", "learning_rate: fast", r":7: learning_rate is 'fast'; expected a number"),
    ("batch_size: 1", "deterministic: yes", r":7: YAML reads the bare word yes as a truth value; write true or false"),
    ("batch_size: 1", "deterministic: 1", r":7: deterministic is 1; expected true or false"),
    ("batch_size: 1", "memory: 10", r":7: memory is 10; expected a size with its unit, such as 80GiB$"),
    ("batch_size: 1", "mask: casual", r":7: mask 'casual' is unknown; write full, causal or sliding_window"),
    ("batch_size: 1", "checkpoint: {tail: 2}", r":7: checkpoint.tail is 2.0; expected a fraction from 0"),
    (
        "batch_size: 1",
        "checkpoint: {tale: 1}",
        r":7: unknown setting checkpoint.tale in fixed; did you mean checkpoint",
    ),
    (
        "batch_size: 1",
        "checkpoint: 1",
        r":7: checkpoint is 1; it has the settings checkpoint\.every, checkpoint\.tail, checkpoint\.offload, "
        r"checkpoint\.replay, checkpoint\.whole_layers, checkpoint\.mlp, checkpoint\.plan, checkpoint\.upstream or "
        r"checkpoint\.host_layers",
    ),
    ("batch_size: 1", "checkpoint: {replay: halve}", r":7: checkpoint.replay is 'halve'; expected hold or bisect"),
    ("batch_size: 1", "data: no/such/file.txt", r":7: data is 'no/such/file.txt', which is no file here"),
    ("batch_size: 1", "task: train", r":7: task does not belong in fixed; write it as task"),
    ("batch_size: 1", "seed: 3", r":7: seed does not belong in fixed; write it as seeds"),
    ("batch_size: 1", "method: burst", r":5: method is swept, but .*:7 gives it one value; keep one"),
    ("batch_size: 1", "dtype: bf16", r":7: the key dtype was already given at .*:7; keep one"),
    ("batch_size: 1", "checkpoint.tail: 0, checkpoint: {tail: 1}", r":7: fixed.checkpoint.tail was already given"),
    ("[1k, 2k]", "[1k, 2q]", r":6: seq_len: '2q' is not a length; write a number of tokens such as"),
    ("[1k, 2k]", "[1:30]", r":6: YAML reads 1:30 as a base-60 number"),
    ("[1k, 2k]", "[0512]", r":6: YAML reads 0512 as an octal number"),
    ("[1k, 2k]", "[-1]", r":6: seq_len is -1; give a number of at least 1"),
    ("[1k, 2k]", "[99999999999999999999]", r":6: seq_len is a number of more than 64 bits; give a smaller one"),
    ("[1k, 2k]", "[]", r":6: sweep.seq_len is an empty list; give at least one value"),
    ("[1k, 2k]", "[[1k]]", r":6: seq_len is a list; a setting takes one value"),
    ("title: A question", "title: 2026-01-01", r":1: YAML reads 2026-01-01 as a date"),
    ("title: A question", "title: 7", r":1: title is 7; expected text; write it in quotes"),
    ("title: A question", "seq_len: 1k", r":1: seq_len is a setting; write it as fixed.seq_len or sweep.seq_len"),
    ("title: A question", "save: {every: 5}", r":1: save is a key of training configurations, .*; give .* burst train"),
    ("title: A question", "on: x", r":1: YAML reads the bare word on as a truth value"),
    ("title: A question", "7: x", r":1: the key 7 is not text; write it in quotes"),
    ("title: A question", "title: !!python/name:os.system x", r":1: found the YAML tag .*python"),
    ("title: A question", "title: [broken", r":\d: not readable as YAML \(.+\); correct the syntax there"),
    ("title: A question", "<<: {title: x}", r":1: found the merge key <<"),
    ("task: train", "task: trian", r":2: task is 'trian'; expected train, attention, lm_head or linear"),
    ("task: train\n", "", r": no task is given; add task: train, attention, lm_head, linear or a list of them"),
    ("model: tiny\n", "", r"question.yaml: no model is given; add model or sweep.model"),
    ("  seq_len: [1k, 2k]\n", "", r"question.yaml: no seq_len is given; add fixed.seq_len or sweep.seq_len"),
    ("model: tiny", "model: tinny", r":3: unknown model tinny; did you mean tiny\?"),
    ("model: tiny", "model: gone.yaml", r":3: the model file .*gone.yaml does not exist"),
    ("model: tiny", "model: {layers: 2}", r":3: model lacks hidden, ffn, heads, .*; add what is missing"),
    ("model: tiny", "model: [tiny]", r":3: model is a list; expected text"),
    ("warmup: 2", "warmup: -1", r":8: steps.warmup is -1; expected 0 or more"),
    ("warmup: 2", "warmup: 99999999999", r":8: steps.warmup is 99999999999; expected at most 1000000; give fewer"),
    ("warmup: 2", "settle: 99999999999", r":8: steps.settle is 99999999999; expected at most 1000000; give fewer"),
    ("measured: 5", "measured: 1000001", r":8: steps.measured is 1000001; expected at most 1000000; give fewer"),
    ("warmup: 2", "rounds: 0", r":8: steps.rounds is 0; expected a number from 1 to 1000"),
    ("warmup: 2", "rounds: 5000", r":8: steps.rounds is 5000; expected a number from 1 to 1000"),
    ("warmup: 2", "rounds: 2.5", r":8: steps.rounds is 2.5; expected a whole number"),
    ("warmup: 2", "rounds: 3, rounds: 3", r":8: the key rounds was already given at"),
    ("warmup: 2", "round: 2", r":8: unknown key round in steps; did you mean rounds\?"),
    ("warmup: 2", "interval: 0.01", r":8: unknown key interval in steps; expected warmup, "),
    ("batch_size: 1", "steps.rounds: 3", r":7: steps.rounds does not belong in fixed; write it as steps"),
    ("title: A question", "name: a/b", r":1: name is 'a/b'; expected one word that can name a folder"),
    ("title: A question", "name: ..", r":1: name is '..'; expected one word that can name a folder"),
    ("warmup: 2", "warm: 2", r":8: unknown key warm in steps; did you mean warmup\?"),
    ("seeds: [0]", "seeds: [-1]", r":9: seeds has -1; give numbers of at least 0"),
    ("seeds: [0]", "fixed.x: 1", r":9: unknown key fixed.x in the experiment; did you mean fixed"),
    ("batch_size: 1", "steps: {warmup: 1}", r":7: steps does not belong in fixed; write it as steps"),
    ("seeds: [0]", "limits: {trial_seconds: -1}", r":9: limits.trial_seconds is -1; expected seconds, or 0 for its d"),
    ("seeds: [0]", "limits: {start_seconds: -1}", r":9: limits.start_seconds is -1; expected seconds, or 0 for its d"),
    ("seeds: [0]", "limits: {share_ranks: true}", r":9: unknown key limits.share_ranks"),
    ("seeds: [0]", "exclude: {method: burst}", r":9: exclude is a mapping; expected a list of mappings"),
    ("seeds: [0]", "exclude: [{}]", r":9: an empty entry of exclude matches every trial"),
    ("seeds: [0]", "exclude: [{methd: burst}]", r":9: unknown key methd in exclude; did you mean method\?"),
    ("seeds: [0]", "reference: {paper: e2e_mian}", r":9: unknown reference e2e_mian; did you mean e2e_main\?"),
    ("seeds: [0]", "reference: {papr: e2e_main}", r":9: unknown key papr in reference; did you mean paper\?"),
    ("exclude: []", "exclud: []", r":11: unknown key exclud in scale smoke; did you mean exclude\?"),
    ("[256]", "[256q]", r":11: seq_len: '256q' is not a length"),  # in a scale nobody asked for
]


@pytest.mark.parametrize(("old", "new", "message"), WRONG)
def test_a_wrong_file_gives_one_sentence_with_its_place(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in BASE
    with pytest.raises(UsageError, match=message) as caught:
        _load(tmp_path, BASE.replace(old, new, 1))
    assert "\n" not in str(caught.value)


def test_an_alias_is_refused_before_it_can_grow(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r":1: one value is shared by an anchor and an alias; write it out"):
        _load(tmp_path, "title: &t x\nsweep: {data: [*t, *t]}\n")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the experiment file is empty; expected a mapping"),
        (b"# nothing\n", "the experiment file is empty; expected a mapping"),
        (b"- a\n- b\n", "the experiment file is a list; expected a mapping"),
        (b"just words\n", "the experiment file is 'just words'; expected a mapping"),
        (b"title: \xff\n", "byte 7 is not UTF-8; save the experiment file as UTF-8"),
        (b"title: \x00\n", ":1: found the character"),
        (b"title: a\n---\ntitle: b\n", "not readable as YAML"),
        (b"title: " + b"[" * 5000, "nested too deeply"),
        *((b"fixed: {mask: " + b"{a: " * n + b"x" + b"}" * n + b"}", ":1: nested too deeply") for n in (30, 400)),
        (b"seeds: " + b"9" * 5000, "'99999999999999999999' is not a usable number"),
    ],
)
def test_an_unreadable_file_gives_one_sentence(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "question.yaml"
    path.write_bytes(content)
    with pytest.raises(UsageError) as caught:
        load_experiment(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"gone.yaml: no such experiment file; check the path"):
        load_experiment(tmp_path / "gone.yaml")
    with pytest.raises(UsageError, match="the experiment file is a directory; give a regular file"):
        load_experiment(tmp_path)


def test_an_unknown_scale_names_its_nearest_neighbour(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"question.yaml: unknown scale smok; did you mean smoke\?"):
        _load(tmp_path, BASE, "smok")
    with pytest.raises(UsageError, match="unknown scale smoke; the file has none; leave --scale out"):
        _load(tmp_path, BASE.partition("scales:")[0], "smoke")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fixed.dtype", "this is not path=value; write for example"),
        ("=fp32", "this is not path=value"),
        ("fixed..dtype=fp32", "this is not path=value"),
        ("fixd.dtype=fp32", r"fixd is no setting and no key of an experiment; did you mean fixed.dtype\?"),
        ("chekpoint.tail=1", r"did you mean checkpoint.tail\?"),
        ("setps.measured=1", r"did you mean steps.measured\?"),
        ("fixed.dtyp=fp32", r"unknown setting dtyp in fixed; did you mean dtype\?"),
        ("dtyp=fp32", r"did you mean dtype\?"),
        ("seed=1", "seed does not belong in fixed; write it as seeds"),
        ("seq_len=[1k, 2k]", "seq_len is a list; a setting takes one value, write a list under sweep.seq_len"),
        ("fixed.dtype=fp31", r"dtype is 'fp31'; expected fp64, fp32 or bf16"),
        ("fixed.dtype=[", "not readable as YAML"),
        ("fixed.dtype=", "dtype is empty; expected fp64, fp32 or bf16"),
        ("fixed=fp32", "fixed is 'fp32'; expected a mapping"),
        ("steps.measured=many", "measured is 'many'; expected a whole number"),
        ("scales.smoke.model=tiny", "scales cannot be set here; choose one with --scale"),
        ("title.x=1", "title is a mapping; expected text"),
        ("sweep.seq_len=[1k,2q]", "seq_len: '2q' is not a length"),
    ],
)
def test_a_bad_override_is_quoted_in_its_error(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        _load(tmp_path, BASE, None, override)
    assert f"--set {override}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_setting_is_overridden_by_its_own_name_as_below_fixed(tmp_path: Path) -> None:
    short = _load(tmp_path, BASE, None, "seq_len=4k", "checkpoint.tail=0.5", "checkpoint.every=2")
    long = _load(tmp_path, BASE, None, "fixed.seq_len=4096", "fixed.checkpoint={tail: 0.5, every: 2}")
    assert short == long
    assert (short.fixed["seq_len"], short.fixed["checkpoint.tail"], "seq_len" in short.sweep) == (4096, 0.5, False)


def test_a_path_of_thousands_of_levels_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^--set fixed\.\.\.: its path has 3001 levels; expected at most 20$"):
        _load(tmp_path, BASE, None, "fixed" + ".a" * 3000 + "=1")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    start=st.integers(0, len(BASE)),
    length=st.integers(0, 12),
    insert=st.text(alphabet="[]{}:,-*&!|>'\"#%@ \n\tkM019.truefixd", max_size=8),
)
def test_no_damaged_file_escapes_as_another_error(tmp_path: Path, start: int, length: int, insert: str) -> None:
    damaged = BASE[:start] + insert + BASE[start + length :]
    try:
        experiment = _load(tmp_path, damaged)
    except UsageError:
        return
    assert experiment.tasks


def test_the_example_of_the_page_loads(tmp_path: Path) -> None:
    example = PAGE.read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
    assert _load(tmp_path, example, "smoke").sweep["seq_len"] == (1024,)

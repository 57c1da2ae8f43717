"""Training configurations: what they may say, and the one sentence for what they may not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from engine.settings import AdamWSettings, Checkpoint
from engine.training.config import Evaluation, Saving, Schedule
from harness.base.errors import UsageError
from harness.training.file import load_training

MINIMAL = "model: tiny\nseq_len: 1k\nsteps: 10\n"


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str) -> Path:
        (tmp_path / "run.yaml").write_text(text)
        return tmp_path / "run.yaml"

    return write


def test_a_minimal_file_takes_the_defaults_of_timed_trials(written) -> None:
    config = load_training(written(MINIMAL)).config
    assert (config.settings.task, config.settings.method, config.settings.seq_len) == ("train", "burst", 1024)
    assert (config.settings.dtype, config.settings.data, config.steps) == ("bf16", "python_docs", 10)
    assert (config.optimizer, config.evaluate.every, config.save.keep) == (AdamWSettings(), 0, 2)


def test_every_section_reaches_the_configuration_and_overrides_win(written) -> None:
    text = MINIMAL + (
        "cp_size: 2\nworld_size: 4\nbatch_size: 3\ngradient_accumulation: 5\ncheckpoint: {every: 1, tail: 0.5}\n"
        "optimizer: {weight_decay: 0}\nlr_schedule: {warmup: 2}\nevaluate: {every: 5}\nsave: {every: 4}\n"
        "metrics: {tracker: wandb}\n"
    )
    overrides = ["save.keep=7", "checkpoint.tail=0.25", "lr_schedule={minimum: 0}", "learning_rate=1e-3"]
    config = load_training(written(text), overrides).config
    assert config.settings.checkpoint == Checkpoint(every=1, tail=0.25)
    assert config.settings.learning_rate == 1e-3
    assert config.optimizer == AdamWSettings(weight_decay=0.0)
    assert config.lr_schedule == Schedule(warmup=2, minimum=0.0)
    assert (config.evaluate, config.save) == (Evaluation(every=5), Saving(every=4, keep=7))
    assert config.metrics.tracker == "wandb"
    assert (config.sequences_per_step, config.tokens_per_step) == (2 * 3 * 5, 2 * 3 * 5 * 1024)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("learning_rat: 1", r":4: unknown key learning_rat in the training .*; did you mean learning_rate\?"),
        ("lr: 1", ":4: unknown key lr; write it as learning_rate"),
        ("task: train", ":4: task is a key of experiments, .*; give an experiment to burst run, or leave task out"),
        ("sweep: {memory: [1GiB]}", ":4: sweep is a key of experiments, .* or write its settings at the top level, w"),
        ("fixed: {memory: 1GiB}", ":4: fixed is a key of experiments, .* or write its settings at the top level, w"),
        ("seeds: [1]", ":4: seeds is a key of experiments, .* burst run, or write seed, with one number"),
        ("scales: {}", ":4: scales is a key of experiments, .* burst run, or leave scales out"),
        ("settings: tuned", ":4: settings is a key of experiments, .* burst run, or leave settings out"),
        ("memory: [1GiB]", ":4: memory is a list, and a .*of each setting; write one, such as memory: '1GiB'$"),
        ("batch_size: [2, 4]", ":4: batch_size is a list, and .* write one, such as batch_size: 2$"),
        ("checkpoint: [{every: 1}]", ":4: checkpoint is a list, and a training run has one .* setting; write one$"),
        ("optimizer: {lr: 1}", r":4: unknown key optimizer\.lr; write it as learning_rate"),
        ("schedule: {warmup: 1}", r":4: unknown key schedule\.warmup; write it as lr_schedule\.warmup"),
        ("save: {evry: 1}", r":4: unknown key save\.evry; did you mean every\?"),
        ("save: {keep: 0}", r":4: save\.keep is 0; give at least 1"),
        ("save: {grace_seconds: 0}", r":4: save\.grace_seconds is 0; give a number above 0"),
        ("evaluate: {every: -1}", r":4: evaluate\.every is -1"),
        ("evaluate: {sequences: 0}", r":4: evaluate\.sequences is 0"),
        ("evaluate: {sequences: 9}", r":4: evaluate\.sequences is 9, but without .* nothing is evaluated; give"),
        ("method: trl_upstream", ":4: method trl_upstream is a program of its own, .*; choose a method that runs"),
        ("lr_schedule: {minimum: 2}", r":4: lr_schedule\.minimum is 2; give a part of learning_rate"),
        ("lr_schedule: {warmup: 11}", r":4: lr_schedule\.warmup is 11, and steps is 10; give fewer"),
        ("optimizer: {beta2: 1}", r":4: optimizer\.beta2 is 1; give a number from 0 to below 1"),
        ("optimizer: {max_grad_norm: 0}", r":4: optimizer\.max_grad_norm is 0"),
        ("seed: -1", ":4: seed is -1"),
        ("mask: spiral", ":4: "),
        ("data: no/such", ":4: data is 'no/such', which is no file here"),
        ("data: /", r":4: data is '/', a directory that is no token store \(no header.json in it\); make a store with"),
        ("init_from: no/such", ":4: init_from is 'no/such', which is no directory here"),
        ("cp_size: 0", ":4: cp_size is 0"),
        ("lora: {rank: 8, alpha: 16, targets: [q]}", "lora trains adapters of a given model, found no init_from; name"),
        ("lora: {rank: 0, alpha: 16, targets: [q]}", r":4: lora\.rank is 0; give a whole number of at least 1"),
        ("lora: {rank: 8, alpha: 0, targets: [q]}", r":4: lora\.alpha is 0; give a number above 0"),
        (
            "lora: {rank: 8, alpha: 16, targets: []}",
            r":4: lora\.targets is empty; name at least one of q, k, v, output",
        ),
        ("lora: {rank: 8, alpha: 16, targets: [q, q]}", r":4: lora\.targets has q twice; name each matrix once"),
        ("lora: {rank: 8, alpha: 16, targets: [head]}", r":4: lora\.targets.*'head'"),
        ("lora: {rank: 8, alpha: 16}", ":4: lora .*targets"),
        ("metrics: {tracker: wand}", r":4: metrics.tracker is 'wand'; .*did you mean wandb\?"),
        ("metrics: {tensorboard: 1}", ":4: metrics.tensorboard is 1; expected true or false"),
        ("metrics: {tensorboard: true, tracker: none}", ":4: metrics has both tensorboard and tracker; leave"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(written, line: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_training(written(MINIMAL + line + "\n"))


@pytest.mark.parametrize(
    ("lines", "setting", "reason"),
    [
        ("checkpoint: {every: 0, tail: 0.5}", "checkpoint.tail is 0.5", "no layer is computed again"),
        ("checkpoint: {every: 0, offload: inputs}", "checkpoint.offload is inputs", "no layer is computed again"),
        ("checkpoint: {every: 0, whole_layers: 1}", "checkpoint.whole_layers is 1", "no layer is computed again"),
        ("checkpoint: {whole_layers: 2, tail: 0}", "checkpoint.tail is 0.0", "no layer is computed again"),
        ("checkpoint: {every: 1, replay: bisect}", "checkpoint.replay is bisect", "every layer's input is kept"),
        ("checkpoint: {every: 2, mlp: 0.5}", "checkpoint.mlp is 0.5", "every layer is computed again"),
        ("head_groups: 2\ncheckpoint: {every: 0}", "head_groups is 2", "no layer is computed again"),
    ],
)
def test_what_would_change_nothing_beside_other_values_is_refused(
    written, lines: str, setting: str, reason: str
) -> None:
    words = f": {setting}, which changes nothing because {reason}; set it to "
    with pytest.raises(UsageError, match=rf"run\.yaml:4{re.escape(words)}[\w.]+, or change checkpoint\.every or"):
        load_training(written(MINIMAL + lines + "\n"))


@pytest.mark.parametrize(
    "lines",
    [
        "checkpoint: {every: 0, mlp: 0.5, host_layers: 1, tail: 1}",
        "checkpoint: {every: 2, replay: bisect, tail: 0.5, offload: all, whole_layers: 1, mlp: 0.5}\nhead_groups: 2",
        "checkpoint: {plan: auto, tail: 0.5, mlp: 0.5}\nhead_groups: 2",  # the planner decides what they apply to
        "evaluate: {every: 0, sequences: 9}",
    ],
)
def test_what_has_an_effect_or_may_have_one_is_taken(written, lines: str) -> None:
    load_training(written(MINIMAL + lines + "\n"))


def test_a_value_out_of_range_is_named_with_the_option_that_gave_it(written) -> None:
    with pytest.raises(UsageError, match=r"^--set steps=-3: steps is -3; give at least 1$"):
        load_training(written(MINIMAL), ["steps=-3"])


def test_steps_of_an_experiment_are_named_by_the_key_that_was_given(written) -> None:
    words = r"steps has the key settle, as in an experiment \(burst run\), and in training steps is a whole number;"
    with pytest.raises(UsageError, match=rf"^--set steps\.settle=3: {words} write for example steps: 300$"):
        load_training(written(MINIMAL), ["steps.settle=3"])
    with pytest.raises(UsageError, match=rf"run\.yaml:3: {words}"):
        load_training(written(MINIMAL.replace("steps: 10", "steps: {settle: 3}")))


def test_data_that_is_no_text_is_named_with_its_line(written, tmp_path: Path) -> None:
    lines = tmp_path / "my.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "two"}\n')
    with pytest.raises(UsageError, match=r"run\.yaml:4: data .*my\.jsonl' looks like JSON Lines, whose syntax"):
        load_training(written(MINIMAL + f"data: {lines}\n"))


def test_the_key_of_version_0_1_still_means_tensorboard(written) -> None:
    config = load_training(written(MINIMAL + "metrics: {tensorboard: true}\n")).config
    assert config.metrics.tracker == "tensorboard"
    config = load_training(written(MINIMAL), ["metrics.tensorboard=false"]).config
    assert config.metrics.tracker == "none"


@pytest.mark.parametrize("key", ["model", "seq_len", "steps"])
def test_what_has_no_default_must_be_given(written, key: str) -> None:
    text = "".join(line for line in MINIMAL.splitlines(keepends=True) if not line.startswith(key))
    with pytest.raises(UsageError, match=f"found no {key}; add at the top level what is missing"):
        load_training(written(text))


def test_an_override_of_an_unknown_key_is_refused_by_its_own_text(written) -> None:
    with pytest.raises(UsageError, match=r"--set save\.kep=1: unknown key save\.kep; did you mean keep\?"):
        load_training(written(MINIMAL), ["save.kep=1"])


def test_the_example_of_the_documentation_can_be_read() -> None:
    config = load_training(Path(__file__).parents[3] / "examples" / "train_tiny.yaml").config
    assert (config.settings.model.name, config.settings.cp_size) == ("tiny", 2)


def test_a_model_folder_with_weights_that_are_not_read_is_said(written: Any, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 128,
    }
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps(config))
    asked = MINIMAL.replace("model: tiny", f"model: {folder}")
    asked += "data: python_docs\n"
    assert load_training(written(asked)).notes == ()  # a shape alone
    (folder / "model.safetensors").touch()
    said = f"of {folder} the shape is used and not the weights: the run starts from random ones; to start from those, "
    [note] = load_training(written(asked)).notes
    assert said + f"add init_from: {folder}" in note
    assert load_training(written(asked + f"init_from: {folder}\n")).notes == ()
    assert load_training(written(MINIMAL + "data: python_docs\n")).notes == ()


def test_memory_for_which_nothing_is_planned_is_said(written) -> None:
    asked = MINIMAL + "data: python_docs\nmemory: 1GiB\n"
    assert load_training(written(asked)).notes == ()
    [note] = load_training(written(asked + "checkpoint: {every: 0}\n")).notes
    assert (
        ":5: memory is '1GiB', but nothing is planned for it, because checkpoint is set; leave checkpoint out" in note
    )


def test_a_run_whose_data_nobody_named_says_what_it_trains_on(written) -> None:
    [note] = load_training(written(MINIMAL)).notes
    assert "no data is given, so the run trains on the bytes of Python's own documentation; set data to" in note

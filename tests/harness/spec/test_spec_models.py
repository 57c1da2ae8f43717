"""The shipped models, hardware and experiments say what their sources say."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from cluster.files.reader import Node
from engine.models.decoder import Decoder
from harness.base.errors import UsageError
from harness.machine.this_machine import Machine
from harness.metrics.hardware import all_hardware, hardware_for, load_hardware
from harness.plan.matrix import plan
from harness.spec.experiment import load_experiment
from harness.spec.models import MODELS_DIR, load_model, read_model

EXPERIMENTS = MODELS_DIR.parent
LAPTOP = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)

# thunlp/BurstEngine @426eb7a, apps/llama/config and plot_code; llama3_8b and qwen3_8b: untied, as published.
PUBLISHED_PARAMETERS = {
    "7b": 6_738_415_616,
    "7b_artifact": 5_295_575_040,
    "13b": 13_015_864_320,
    "14b": 13_916_984_320,
    "30b": 32_606_263_296,
    "70b": 78_371_889_152,
    "llama3_8b": 8_030_261_248,
    "qwen3_8b": 8_190_735_360,
}


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED_PARAMETERS.items())
def test_models_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert load_model(MODELS_DIR / f"{name}.yaml").parameters == parameters


def test_every_shipped_model_loads_under_its_own_name() -> None:
    for path in MODELS_DIR.glob("*.yaml"):
        assert load_model(path).name == path.stem


@pytest.mark.parametrize("path", sorted(MODELS_DIR.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_model_states_its_parameters_and_builds_with_as_many(path: Path) -> None:
    shape = load_model(path)
    with torch.device("meta"):
        model = Decoder(shape)
    assert f"\nparameters: {sum(parameter.numel() for parameter in model.parameters())}\n" in path.read_text("utf-8")


def test_shapes_of_8b_have_their_published_details() -> None:
    llama, qwen = (load_model(MODELS_DIR / f"{name}.yaml") for name in ("llama3_8b", "qwen3_8b"))
    assert (llama.heads, llama.kv_heads, llama.head_dim, llama.vocab, llama.ffn) == (32, 8, 128, 128_256, 14_336)
    assert (llama.rope_base, llama.norm_eps, llama.qk_norm) == (500_000, 1e-5, False)
    assert (qwen.heads, qwen.kv_heads, qwen.head_dim, qwen.vocab, qwen.ffn) == (32, 8, 128, 151_936, 12_288)
    assert (qwen.rope_base, qwen.norm_eps, qwen.qk_norm) == (1_000_000, 1e-6, True)


@pytest.mark.parametrize("name", ["7b", "13b", "14b", "30b", "70b"])
def test_a_shape_on_which_sources_disagree_says_so(name: str) -> None:
    assert "artifact's" in load_model(MODELS_DIR / f"{name}.yaml").note


@pytest.mark.parametrize("name", ["tiny", "tiny_qwen3"])
def test_tiny_shapes_are_small_and_split_over_four_ranks_of_heads(name: str) -> None:
    tiny = load_model(MODELS_DIR / f"{name}.yaml")
    assert tiny.parameters < 2_000_000
    assert tiny.kv_heads % 4 == 0
    assert tiny.vocab == 256


def test_a_wrong_parameter_count_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    text = (MODELS_DIR / "tiny.yaml").read_text(encoding="utf-8").replace("459392", "459393")
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=r"odd.yaml:\d+: parameters is 459,393, but the shape has 459,392"):
        load_model(path)


def test_an_unknown_model_names_its_nearest_neighbour(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="here: unknown model lama3_8b; did you mean llama3_8b"):
        read_model(Node("lama3_8b", "here"), tmp_path)


def test_an_unknown_architecture_names_its_nearest_neighbour(tmp_path: Path) -> None:
    path = tmp_path / "odd.yaml"
    text = (MODELS_DIR / "tiny.yaml").read_text(encoding="utf-8")
    path.write_text(text + "\narchitecture: lama\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"odd.yaml:2: unknown architecture lama; did you mean llama"):
        load_model(path)


def test_hyphens_may_stand_for_the_underscores_of_a_name(tmp_path: Path) -> None:
    hyphens, underscores = (read_model(Node(name, "here"), tmp_path) for name in ("qwen3-8b", "qwen3_8b"))
    assert hyphens == underscores
    assert hyphens.name == "qwen3_8b"


def test_a_name_with_hyphens_of_its_own_goes_before_one_with_underscores(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    text = (MODELS_DIR / "tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "models" / "qwen3-8b.yaml").write_text(text, encoding="utf-8")
    assert read_model(Node("qwen3-8b", "here"), tmp_path).name == "qwen3-8b"


def test_an_excluded_model_may_be_spelt_with_hyphens_too(tmp_path: Path) -> None:
    path = tmp_path / "two.yaml"
    path.write_text(
        "task: train\n"
        "sweep: {model: [llama3-8b, qwen3-8b], method: [burst], seq_len: [1k]}\n"
        "exclude: [{model: llama3-8b}]\n"
        "scales: {smoke: {}}\n",
        encoding="utf-8",
    )
    assert [trial.settings.model.name for trial in plan(load_experiment(path), LAPTOP)] == ["qwen3_8b"]


def test_a_model_beside_the_experiment_is_found_by_name_and_by_path(tmp_path: Path) -> None:
    (tmp_path / "models").mkdir()
    text = (MODELS_DIR / "tiny.yaml").read_text(encoding="utf-8")
    (tmp_path / "models" / "mine.yaml").write_text(text, encoding="utf-8")
    by_name, by_path = (read_model(Node(value, "here"), tmp_path) for value in ("mine", "models/mine.yaml"))
    assert by_name == by_path
    assert by_name.name == "mine"


CONFIG = {
    "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256, "rms_norm_eps": 1e-6, "hidden_act": "silu",
}  # fmt: skip


def test_a_folder_with_a_configuration_is_a_model_named_after_it(tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    for written in ("weights", "./weights"):
        shape = read_model(Node(written, "here"), tmp_path)
        assert (shape.name, shape.architecture, shape.layers, shape.head_dim) == ("weights", "llama", 2, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sliding_window": 4096}, r"here: .*config.json: sliding_window is 4096, which .*; expected missing"),
        ({"hidden_act": "relu"}, r"here: .*config.json: hidden_act is 'relu', which .*; expected 'silu'"),
        ({"num_key_value_heads": 3}, "4 query heads are not divisible by 3 KV heads"),
        ({"architectures": ["Other"]}, r"architectures is \['Other'\]; expected a list of one of .*LlamaForCausalLM"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_with_its_key_and_both_values(tmp_path, change, words):
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "config.json").write_text(json.dumps(CONFIG | change), encoding="utf-8")
    with pytest.raises(UsageError, match=words):
        read_model(Node("weights", "here"), tmp_path)


def test_a_folder_that_is_not_there_or_holds_no_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"here: the model folder .*/other does not exist; give a name, or a path"):
        read_model(Node("./other", "here"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"here: .*empty/config.json: cannot be read"):
        read_model(Node("empty", "here"), tmp_path)


@pytest.mark.parametrize("name", ["weights/config.json", "weights/model.safetensors", "config.json"])
def test_a_file_in_a_model_folder_points_at_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "weights").mkdir()
    for path in (tmp_path / name, tmp_path / name.replace("model.safetensors", "config.json")):
        path.write_text("{}", encoding="utf-8")
    expected = f"here: the model {tmp_path / name} is a file, where a folder is expected; did you mean "
    with pytest.raises(UsageError, match=re.escape(f"{expected}{(tmp_path / name).parent}?")):
        read_model(Node(name, "here"), tmp_path)
    (tmp_path / "note").write_text("x", encoding="utf-8")
    (tmp_path / "config.json").unlink(missing_ok=True)
    with pytest.raises(UsageError, match=r"note is a file, where a folder is expected; give one with config\.json, or"):
        read_model(Node("./note", "here"), tmp_path)


def test_every_shipped_experiment_loads_at_all_its_scales() -> None:
    files = sorted([*EXPERIMENTS.glob("*.yaml"), *EXPERIMENTS.glob("paper/*.yaml")])
    assert files
    for path in files:
        assert load_experiment(path, "smoke").scale == "smoke"  # loading checks the other scales as well


@pytest.mark.parametrize(
    ("gpu_name", "name", "peak"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100", 312),
        ("NVIDIA A800-SXM4-80GB", "a800", 312),
        ("NVIDIA H100 80GB HBM3", "h100", 989),
        ("NVIDIA H200", "h200", 989),
    ],
)
def test_hardware_is_found_by_the_name_nvidia_smi_prints(gpu_name: str, name: str, peak: float) -> None:
    hardware = hardware_for(gpu_name)
    assert hardware is not None
    assert (hardware.name, hardware.peak_bf16_tflops) == (name, peak)


@pytest.mark.parametrize("gpu_name", ["cpu", "", "NVIDIA H100 PCIe", "NVIDIA H200 NVL"])
def test_a_gpu_without_a_file_has_no_peak_rather_than_a_relatives(gpu_name: str) -> None:
    assert hardware_for(gpu_name) is None


def test_no_two_files_claim_the_same_gpu() -> None:
    names = [name for hardware in all_hardware().values() for name in hardware.gpu_names]
    assert len(names) == len(set(names))


def test_measured_speeds_of_h200_stay_below_its_peak() -> None:
    h200 = all_hardware()["h200"]
    assert h200.gemm_tflops == 796
    assert h200.kernel_ceilings["fa4"] == {"forward": 660, "backward": 625}
    assert h200.kernel_ceilings["cudnn"] == {"forward": 555, "backward": 555}  # measured as one figure
    speeds = [speed for kernel in h200.kernel_ceilings.values() for speed in kernel.values()]
    assert max([h200.gemm_tflops, *speeds]) < h200.peak_bf16_tflops


HARDWARE = """\
title: GPU
gpu_names: [GPU 1]
peak_bf16_tflops: 100
memory_gib: 10
kernel_ceilings: {fa2: {forward: 50, backward: 40}}
sources: {peak_bf16_tflops: datasheet, memory_gib: datasheet, kernel_ceilings: measured}
"""


MEASURED = 'measured: {kernel_ceilings: {when: "2026-11-20", where: a GPU, what: 64K tokens}}\n'


def test_a_hardware_file_may_say_when_and_where_a_figure_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "gpu.yaml"
    path.write_text(HARDWARE, encoding="utf-8")
    assert load_hardware(path).source_of("kernel_ceilings") == "experiments/hardware/gpu.yaml, measured"
    path.write_text(HARDWARE + MEASURED, encoding="utf-8")
    assert load_hardware(path).source_of("kernel_ceilings") == ("experiments/hardware/gpu.yaml, 2026-11-20, 64K tokens")


def test_every_measured_figure_of_the_shipped_files_says_when_and_where() -> None:
    for hardware in all_hardware().values():
        figures = {"gemm_tflops": hardware.gemm_tflops, "kernel_ceilings": hardware.kernel_ceilings}
        assert {name for name, value in figures.items() if value} <= hardware.measured.keys()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("kernel_ceilings: {when", "gemm_tflops: {when", r"gpu.yaml:7: unknown key gemm_tflops in measured; "),
        ("what: ", "size: ", r"gpu.yaml:7: unknown key measured.kernel_ceilings.size; "),
        (", what: 64K tokens", "", r"gpu.yaml:7: measured.kernel_ceilings lacks what; add what is missing"),
        ('"2026-11-20"', "last week", r"gpu.yaml:7: when is last week; expected a day such as"),
        ('"2026-11-20"', "2026", r"gpu.yaml:7: measured.kernel_ceilings.when is 2026; expected text"),
    ],
)
def test_a_wrong_time_or_place_of_a_measurement_is_explained(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "gpu.yaml"
    assert old in MEASURED
    path.write_text(HARDWARE + MEASURED.replace(old, new), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        load_hardware(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("peak_bf16_tflops: 100", "peak_bf16_tflops: 0", r"gpu.yaml:3: peak_bf16_tflops is 0; expected a number above"),
        ("peak_bf16_tflops: 100", "peak_bf16_tflop: 100", r"gpu.yaml:3: unknown key .*; did you mean peak_bf16_tflops"),
        (
            "title: GPU\n",
            "title: GPU\ngpus_per_node: 0\n",
            "gpus_per_node is 0; expected a whole number",
        ),
        ("title: GPU\n", "", "gpu.yaml:1: the file lacks title"),
        ("memory_gib: datasheet, ", "", r"gpu.yaml:6: sources lacks memory_gib"),
        ("fa2: {", "fa9: {", r"gpu.yaml:5: unknown key fa9 in kernel_ceilings; did you mean"),
        (", backward: 40", "", r"gpu.yaml:5: kernel_ceilings.fa2 gives forward; expected forward and backward"),
    ],
)
def test_a_wrong_hardware_file_is_explained(tmp_path: Path, old: str, new: str, message: str) -> None:
    path = tmp_path / "gpu.yaml"
    assert old in HARDWARE
    path.write_text(HARDWARE.replace(old, new), encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        load_hardware(path)

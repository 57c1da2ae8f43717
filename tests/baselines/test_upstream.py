"""Adapters of foreign systems: their commands as whole strings, their logs by the systems' own formats, their refusals.

test_upstream_run.py runs foreign programs for real.
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from baselines.called import InWorker
from baselines.drive import GpuWatch
from baselines.drive import main as drive
from baselines.install.places import InstallPlace
from baselines.megatron_lm import MegatronLM
from baselines.programs import PROGRAMS
from baselines.upstream import Upstream, foreign_environment
from engine.measurement import GpuState, write_json
from engine.memory.gpu_state import GpuReading
from engine.method import method_unsupported_reason
from engine.settings import Checkpoint, Steps, TrialSettings, to_json
from engine.shape import ModelShape
from harness.machine.this_machine import Machine
from harness.plan.unsupported import unsupported_reason
from harness.spec.methods import all_methods, method_named
from harness.spec.models import named_model
from tests.patience import AMPLE

LAPTOP = Machine(hostname="laptop", device="cpu", cores=2, memory_gib=8)
UPSTREAM = [name for name in all_methods() if name.endswith("_upstream")]
SHAPE = ModelShape(
    name="1b", layers=16, hidden=2048, ffn=8192, heads=16, kv_heads=16, head_dim=128, vocab=32000, rope_base=500000
)
WHOLE = Checkpoint(every=1, tail=0)


def settings(method: str, **changes: Any) -> TrialSettings:
    """A trial that the method runs."""
    task = method_named(method).tasks[0]  # type: ignore[attr-defined]
    values = {"task": task, "model": SHAPE, "seq_len": 16384, "checkpoint": WHOLE, "learning_rate": 1e-5}
    return TrialSettings(method=method, **values | changes)


def rendered(method: str, **changes: Any) -> tuple[str, dict[str, str], dict[str, str]]:
    """Command, environment and files with the folders of this machine as names."""
    found: Upstream = method_named(method)  # type: ignore[assignment]
    place = (
        found.places[0]
        if "flavour" not in changes
        else InstallPlace(system=found.package, flavour=changes.pop("flavour"))
    )
    made = found.render(settings(method, **changes), Path("/T"), place)

    def named(text: str) -> str:
        root = str(Path(__file__).parents[2] / "baselines")
        return text.replace(str(place.folder), "UPSTREAM").replace(root, "BASELINES")

    return (
        named(" ".join(made.command)),
        {name: named(value) for name, value in made.environment.items()},
        {name: named(text) for name, text in made.files.items()},
    )


@pytest.mark.parametrize("name", UPSTREAM)
def test_a_system_is_pinned_and_names_itself(name: str) -> None:
    method: Upstream = method_named(name)  # type: ignore[assignment]
    # Other forms of a system that has one already.
    forms = dict.fromkeys(("transformers_bf16_upstream", "transformers_padded_upstream"), "transformers")
    assert method.package == forms.get(name, name.removesuffix("_upstream"))
    assert method.places[0].pin.flavours


@pytest.mark.parametrize("name", UPSTREAM)
def test_its_own_trial_is_accepted_and_other_settings_are_refused_in_one_sentence(name: str) -> None:
    method, steps = method_named(name), Steps(warmup=1, measured=1)
    own = settings(name, steps=steps)
    assert method.refuse(own) is None
    for changes in (
        {"task": "lm_head"}, {"dtype": "fp64"}, {"mask": "full"}, {"layout": "striped"}, {"backward": "query"},
        {"kernel": "flex"}, {"deterministic": True}, {"loss_kernel": "liger"}, {"tp_size": 16},
    ):  # fmt: skip
        reason = method.refuse(replace(own, **changes, world_size=0))
        assert reason is not None, changes
        assert "; " in reason
        assert "\n" not in reason


def test_parts_of_layers_that_only_the_engine_recomputes_are_refused() -> None:
    own = settings("megatron_lm_upstream", checkpoint=Checkpoint(every=1, tail=0, whole_layers=1))
    reason = method_named("megatron_lm_upstream").refuse(own)
    assert reason == "megatron_lm_upstream has no choice of checkpoint.whole_layers, found 1; set it to 0"


def test_a_setting_that_is_empty_by_default_is_to_be_left_out() -> None:
    reason = method_named("torchtitan_upstream").refuse(settings("torchtitan_upstream", host_memory="64GiB"))
    assert reason == "torchtitan_upstream has no choice of host_memory, found 64GiB; leave host_memory out"


@pytest.mark.parametrize("name", UPSTREAM)
def test_a_plan_names_what_is_missing(name: str) -> None:
    method: Upstream = method_named(name)  # type: ignore[assignment]
    own = settings(
        name, steps=Steps(warmup=1, measured=1), seq_len=1024, model=replace(SHAPE, layers=1, ffn=64, hidden=2048)
    )
    reason, place = unsupported_reason(own, LAPTOP), method.place
    if "cpu" not in place.pinned.devices:
        assert reason == f"{method.system} needs GPUs, and this machine has none; run it on another machine"
    elif place.condition()[0] != "installed":
        assert reason is not None
        assert place.install_command in reason
    missing = method.unavailable("cuda")
    assert missing is None or f"burst setup baselines install {method.package} --flavour" in missing


def test_a_system_that_was_installed_without_flash_attention_4_says_so_before_a_trial_asks_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(InstallPlace, "condition", lambda _: ("installed", ""))
    monkeypatch.setattr(InstallPlace, "folder", property(lambda _: tmp_path))
    method: Upstream = method_named("torchtitan_upstream")  # type: ignore[assignment]
    assert method.unavailable("cuda") is None
    assert method.unavailable("cuda", "fa4") == (
        "torchtitan was installed where no FlashAttention-4 lay beside torch, found kernel fa4; install flash-attn-4 "
        "beside torch, then burst setup baselines install torchtitan --flavour current --anew"
    )
    gpu = replace(LAPTOP, device="cuda", gpu_name="NVIDIA H200", gpu_count=1, gpu_memory_gib=139.0)
    reason = unsupported_reason(settings(method.name, kernel="fa4", cp_size=1), gpu)
    assert "no FlashAttention-4 lay beside torch" in str(reason)
    (tmp_path / "borrowed" / "flash_attn").mkdir(parents=True)
    (tmp_path / "borrowed" / "flash_attn" / "__init__.py").touch()  # flash-attn 2, with which yunchang attends
    yunchang: Upstream = method_named("yunchang_upstream")  # type: ignore[assignment]
    assert yunchang.unavailable("cuda", "fa4") is None
    assert method.unavailable("cuda", "fa4") is not None
    (tmp_path / "borrowed" / "flash_attn" / "cute").mkdir()
    assert method.unavailable("cuda", "fa4") is None


MEGATRON = (
    "UPSTREAM/env/bin/python -u {program}UPSTREAM/source/pretrain_gpt.py --num-layers 16 --hidden-size 2048 "
    "--ffn-hidden-size 8192 --num-attention-heads 16 --kv-channels 128 --normalization RMSNorm --disable-bias-linear "
    "--position-embedding-type rope --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--seq-length 16384 --max-position-embeddings 16384 --tokenizer-type NullTokenizer --vocab-size 31999 "
    "--make-vocab-size-divisible-by 128 {data} --no-create-attention-mask-in-dataloader --num-workers 1 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 5 --eval-iters 0 --eval-interval 1000 --bf16 "
    "--use-distributed-optimizer --lr 1e-05 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--seed 1 --context-parallel-size {cp} --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--transformer-impl transformer_engine --log-interval 1 --log-throughput "
)


@pytest.mark.parametrize(("cp_size", "program"), [(1, ""), (2, "BASELINES/programs/pretrain_megatron.py ")])
def test_the_command_of_megatron_lm(cp_size: int, program: str) -> None:
    command, environment, files = rendered("megatron_lm_upstream", cp_size=cp_size)
    data = " ".join(f"/T/tokens/{step}" for step in range(5))
    data = f"--train-data-path {data} --data-cache-path /T/tokens/cache"
    assert command == MEGATRON.format(program=program, cp=cp_size, data=data) + (
        "--norm-epsilon 1e-05 --rotary-base 500000 --lr-decay-style constant --attention-backend fused "
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl native --no-check-for-nan-in-loss-and-grad "
        "--rerun-mode disabled --manual-gc --manual-gc-interval 100 --log-memory-interval 1 --timing-log-level 0 "
        "--distributed-timeout-minutes 5 --swiglu "
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
    )
    # Where it is installed, torch's own libraries are loaded before others, too.
    assert {name: value for name, value in environment.items() if not name.startswith("LD_")} == {
        "NVTE_FRAMEWORK": "pytorch", "TORCH_EXTENSIONS_DIR": "UPSTREAM/extensions",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONPATH": "BASELINES/stand_ins/fused_weight_gradient_mlp_cuda",
    }  # fmt: skip
    assert files == {"bin/make": "#!/bin/sh\nexit 0\n"}


BLENDED = """class BlendedDataset:
    def __getitem__(self, index):
        return {"dataset_id": 7, "tokens": index}
"""
PRETRAIN = """import sys
import beside
from megatron.core.datasets.blended_dataset import BlendedDataset
if __name__ == "__main__":
    print(BlendedDataset()[3], beside.here, sys.argv[1:])
"""


def test_over_several_ranks_samples_of_megatron_lm_do_not_name_their_dataset(tmp_path: Path) -> None:
    package, source = tmp_path / "site" / "megatron" / "core" / "datasets", tmp_path / "source"
    package.mkdir(parents=True)
    source.mkdir()
    for folder in (package, package.parent, package.parents[1]):
        (folder / "__init__.py").touch()  # comes before a Megatron-LM that is installed
    (package / "blended_dataset.py").write_text(BLENDED)
    (source / "beside.py").write_text("here = 'beside'\n")
    program = source / "pretrain_gpt.py"
    program.write_text(PRETRAIN)
    command = [sys.executable, str(PROGRAMS / "pretrain_megatron.py"), str(program), "--seed", "1"]
    done = subprocess.run(command, env={"PYTHONPATH": str(tmp_path / "site")}, capture_output=True, text=True)
    assert done.stdout == "{'tokens': 3} beside ['--seed', '1']\n", done.stderr


def test_the_papers_megatron_lm_runs_with_the_options_of_the_artifact() -> None:
    command, _, files = rendered("megatron_lm_upstream", cp_size=8, flavour="paper")
    assert command == MEGATRON.format(program="", cp=8, data="--mock-data") + (
        "--use-rotary-position-embeddings --lr-decay-style cosine --min-lr 1e-06 --init-method-std 0.006 "
        "--use-flash-attn --timing-log-level 0 --causal --causal-tflops --method megatron-cp --log-file "
        "/T/megatron.txt --swiglu --sequence-parallel --recompute-granularity full --recompute-method uniform "
        "--recompute-num-layers 1"
    )
    assert files == {}


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        (Checkpoint(every=0), ""),
        (Checkpoint(), "--recompute-granularity selective --recompute-modules mlp"),
        (
            Checkpoint(upstream="block 8"),
            "--recompute-granularity full --recompute-method block --recompute-num-layers 8",
        ),
        (
            Checkpoint(upstream="modules layernorm,mlp"),
            "--recompute-granularity selective --recompute-modules layernorm mlp",
        ),
        (Checkpoint(upstream="offload 4"), "--cpu-offloading-num-layers 4"),
        (
            Checkpoint(every=4, tail=0),
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 4",
        ),
    ],
)
def test_megatron_lm_recomputes_what_the_settings_say(checkpoint: Checkpoint, expected: str) -> None:
    command, _, _ = rendered("megatron_lm_upstream", checkpoint=checkpoint)
    assert command.partition("--swiglu")[2].strip() == expected
    half = settings("megatron_lm_upstream", checkpoint=Checkpoint(tail=0.5))
    assert "found checkpoint.every 1 and tail 0.5" in str(method_named("megatron_lm_upstream").refuse(half))


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("auto", ""),
        ("ring", "--cp-comm-type p2p"),
        ("all_gather", "--cp-comm-type all_gather"),
        ("ulysses", "--cp-comm-type a2a"),
        ("usp", "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"),
    ],
)
def test_megatron_lm_shares_attention_as_the_schedule_says(schedule: str, expected: str) -> None:
    given = {"cp_size": 4, "schedule": schedule, "checkpoint": Checkpoint(every=0)}
    assert method_named("megatron_lm_upstream").refuse(settings("megatron_lm_upstream", **given)) is None
    command, _, _ = rendered("megatron_lm_upstream", flavour="current", **given)
    assert command.partition("--swiglu")[2].strip() == expected


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"cp_size": 4, "schedule": "double_ring"}, "found double_ring; set schedule to one it runs"),
        ({"cp_size": 1, "schedule": "ulysses"}, "found cp_size 1; set schedule to auto"),
        ({"cp_size": 2, "tp_size": 2, "schedule": "usp"}, "found schedule usp and tp_size 2; set tp_size to 1"),
        ({"cp_size": 32, "schedule": "ulysses"}, "found 16 KV heads of model"),
    ],
)
def test_megatron_lm_refuses_a_schedule_that_it_cannot_run(changes: dict[str, Any], found: str) -> None:
    assert found in str(method_named("megatron_lm_upstream").refuse(settings("megatron_lm_upstream", **changes)))


def test_the_papers_megatron_lm_sends_point_to_point_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    method = method_named("megatron_lm_upstream")
    paper = InstallPlace(system="megatron_lm", flavour="paper")
    monkeypatch.setattr(type(method), "place", property(lambda _: paper))
    given = {"cp_size": 4, "checkpoint": Checkpoint(every=1, tail=0)}
    assert method.refuse(settings("megatron_lm_upstream", schedule="ring", **given)) is None
    assert "--cp-comm-type" not in rendered("megatron_lm_upstream", flavour="paper", schedule="ring", **given)[0]
    reason = str(method.refuse(settings("megatron_lm_upstream", schedule="ulysses", **given)))
    assert reason.endswith("burst setup baselines install megatron_lm --flavour current")


def test_megatron_lm_moves_its_optimizer_to_the_host_and_the_papers_copy_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    command, _, _ = rendered("megatron_lm_upstream", flavour="current", optimizer_offload=True)
    assert (
        "--swiglu --optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d --use-precision-aware-optimizer "
        "--recompute-granularity full"
    ) in command
    command, _, _ = rendered("megatron_lm_upstream", flavour="current", optimizer_offload=0.4)
    assert "--use-precision-aware-optimizer --optimizer-offload-fraction 0.4 --recompute-granularity" in command
    method = method_named("megatron_lm_upstream")
    own = settings("megatron_lm_upstream", optimizer_offload=True)
    release, paper = (InstallPlace(system="megatron_lm", flavour=flavour) for flavour in ("current", "paper"))
    monkeypatch.setattr(type(method), "place", release)
    assert method.refuse(own) is None
    monkeypatch.setattr(type(method), "place", paper)
    assert str(method.refuse(own)).endswith("burst setup baselines install megatron_lm --flavour current")
    assert method.refuse(replace(own, optimizer_offload=False)) is None


def test_the_command_of_megatron_deepspeed() -> None:
    command, environment, files = rendered("megatron_deepspeed_upstream", cp_size=8, optimizer_offload=True)
    words = command.split()
    assert words[:3] == ["UPSTREAM/env/bin/python", "-u", "UPSTREAM/source/pretrain_gpt.py"]
    assert " --no-pipeline-parallel --ds-sequence-parallel-size 8 " in command
    assert " --bf16 " in command
    assert command.endswith(
        "--use-flash-attn-v2 --zero-reduce-scatter --log-interval 1 --timing-log-level 0 --deepspeed "
        "--deepspeed_config /T/ds_config.json --zero-stage 3 --checkpoint-activations "
        "--deepspeed-activation-checkpointing --cpu-optimizer"
    )
    assert environment["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    config = json.loads(files["ds_config.json"])
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 8
    assert config["zero_optimization"]["offload_optimizer"] == {"device": "cpu", "pin_memory": True, "ratio": 0.8}
    assert config["bf16"] == {"enabled": True}


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("double_ring", "head_size=1, context_size=32, window_size=8"),
        ("usp", "head_size=4, context_size=8, window_size=8"),
    ],
)
def test_internevo_is_configured_as_in_the_artifact(schedule: str, expected: str) -> None:
    command, environment, files = rendered("internevo_upstream", cp_size=32, schedule=schedule)
    assert command == ("UPSTREAM/env/bin/python -u UPSTREAM/source/train.py --config /T/internevo_config.py --seed 0")
    assert environment["LOG_FILE"] == "/T/internevo.txt"
    config: dict[str, Any] = {}
    exec(files["internevo_config.py"], config)
    assert expected in files["internevo_config.py"]
    assert config["data"]["total_steps"] == 4
    assert config["parallel"]["weight"] == {"size": 32, "overlap": True, "memory_pool": True}


def test_the_command_of_the_artifacts_burstengine() -> None:
    steps = Steps(warmup=1, measured=1)
    command, _, files = rendered("burst_engine_upstream", cp_size=8, optimizer_offload=True, steps=steps)
    folder = "UPSTREAM/source/BurstEngine/apps/llama"
    assert command == (
        f"UPSTREAM/env/bin/python -u {folder}/pretrain_llama_hug_tokenizer.py --model-config /T/config.json "
        f"--vocab {folder}/config/70b/vocab.txt --tokenizer-path UPSTREAM/source/llama-7b/ "
        f"--dataset /T/dataset.json --train-iters 400000 --lr 1e-05 --inspect-iters 100 --warmup-iters "
        "2000 --lr-decay-style noam --weight-decay 0.1 --clip-grad 1.0 --loss-scale 1048576 --start-step 1 --bf16 "
        "--batch-size 1 --max-length 16384 --tp 8 --sp burst_sl_loss --flash cuda --spzero --ckpt --offload"
    )
    assert json.loads(files["config.json"])["dim_ff"] == 8192
    assert json.loads(files["dataset.json"])[0]["path"] == "UPSTREAM/source/data/BE"
    four = settings("burst_engine_upstream", steps=Steps(warmup=1, measured=3))
    assert "ends by itself after printing 3 steps" in str(method_named("burst_engine_upstream").refuse(four))


@pytest.mark.parametrize(
    ("tail", "fused", "expected"),
    [(0.0, False, "burst"), (0.5, True, "burst_sl_loss_sl_ckpt"), (1.0, True, "burst_sl_loss_whole_ckpt")],
)
def test_the_artifact_reads_its_optimizations_from_a_name(tail: float, fused: bool, expected: str) -> None:
    command, _, _ = rendered("burst_engine_upstream", checkpoint=Checkpoint(tail=tail), lm_head_fusion=fused)
    assert f" --sp {expected} " in command


def test_the_command_of_torchtitan() -> None:
    command, _, files = rendered("torchtitan_upstream", cp_size=2, checkpoint=Checkpoint())
    assert command == (
        "UPSTREAM/env/bin/python -u BASELINES/programs/train_torchtitan.py /T/attention.json --model.name "
        "burst_harness --model.flavor trial --training.seq_len 16384 --training.local_batch_size 1 --training.steps 5 "
        "--optimizer.lr 1e-05 --lr_scheduler.warmup_steps 1 --metrics.log_freq 1 --metrics.disable_color_printing "
        "--job.dump_folder /T/torchtitan --parallelism.context_parallel_degree 2 --parallelism.tensor_parallel_degree "
        "1 --debug.seed 0 --compile.enable --activation_checkpoint.mode selective "
        "--activation_checkpoint.selective_ac_option op"
    )
    assert json.loads(files["attention.json"])["ffn"] == 8192
    for words, expected in {
        "every 2": "selective --activation_checkpoint.selective_ac_option 2",
        "budget 0.5": "memory_budget --activation_checkpoint.memory_budget 0.5",
    }.items():
        command, _, _ = rendered("torchtitan_upstream", checkpoint=Checkpoint(upstream=words))
        assert command.endswith(f" --activation_checkpoint.mode {expected}")


# The library of the program and the module that it changes, in the place of packages for GPUs.
ATTENDS_WITH_FA4 = """
import runpy, sys, types

import torch

def module(name, **contents):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)

def forward(q, k, v, **named):
    assert (named["causal"], named["return_lse"]) == (True, True)
    assert named["out"] is None or 0 not in named["out"].stride()  # as the library does
    if named["out"] is not None:
        named["out"].fill_(3)
    return q + 1, torch.zeros(1), None, None, None

class Wrapper:
    sdpa_backends = []

for name in ("flash_attn", "torchtitan", "torchtitan.models"):
    module(name, __path__=[])
module("flash_attn.cute.interface", _flash_attn_fwd=forward, _flash_attn_bwd=lambda *tensors, **named: tensors[:3])
module("flash_attn.cute", __path__=[], interface=sys.modules["flash_attn.cute.interface"])
module("torchtitan.models.attention", ScaledDotProductAttentionWrapper=Wrapper)
sys.path.insert(0, sys.argv[1])
runpy.run_path(sys.argv[1] + "/train_torchtitan.py")["attend_with_fa4"]()
from torch.nn.attention import _fa4, current_flash_attention_impl

x = torch.ones(1, 2, 2, 8)
out, lse = _fa4._fa4_run_forward(x, x, x, None, None, 2, 2, 1.0, True, -1, -1, None)
print(current_flash_attention_impl(), out.mean().item(), [backend.name for backend in Wrapper.sdpa_backends])
given = torch.zeros(2, 2, 8).as_strided((1, 2, 2, 8), (0, 16, 8, 1))
_fa4._fa4_run_forward(x, x, x, None, None, 2, 2, 1.0, True, -1, -1, None, out=given)
print(given.mean().item())
"""


def test_torch_takes_two_results_of_flash_attention_4_in_torchtitan_whatever_the_library_returns() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ATTENDS_WITH_FA4, str(PROGRAMS)], capture_output=True, text=True, timeout=AMPLE
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == "FA4 2.0 ['FLASH_ATTENTION']\n3.0\n"


def test_torch_counts_grouped_heads_in_torchtitan_as_if_each_had_keys_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.utils import flop_counter

    monkeypatch.syspath_prepend(str(PROGRAMS))
    whole, grouped = (1, 8, 64, 16), (1, 2, 64, 16)
    expected = {}
    for name, among in (("sdpa_flop_count", 3), ("sdpa_backward_flop_count", 4)):
        today = getattr(flop_counter, name)
        expected[name] = today(*[whole] * among)

        def of_equal_heads(*shapes: tuple[int, ...], count: Any = today) -> int:  # of torch 2.11
            assert len({shape[1] for shape in shapes}) == 1
            return int(count(*shapes))

        monkeypatch.setattr(flop_counter, name, of_equal_heads)
    runpy.run_path(str(PROGRAMS / "train_torchtitan.py"))["count_grouped_heads"]()
    found = {
        "sdpa_flop_count": flop_counter.sdpa_flop_count(whole, grouped, grouped),
        "sdpa_backward_flop_count": flop_counter.sdpa_backward_flop_count(whole, whole, grouped, grouped),
    }
    assert found == expected


def test_products_in_float8_are_each_systems_own_recipe_of_one_scale_for_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kernel in ("auto", "fa4"):
        trial = settings("torchtitan_upstream", linear_dtype="float8", kernel=kernel)
        assert method_named("torchtitan_upstream").refuse(trial) is None
    command, _, _ = rendered("torchtitan_upstream", linear_dtype="float8")
    assert command.partition("--model.converters ")[2] == (
        "quantize.linear.float8 --quantize.linear.float8.filter_fqns output,auto_filter_small_kn "
        "--quantize.linear.float8.enable_fsdp_float8_all_gather "
        "--quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp"
    )
    command, _, _ = rendered("megatron_lm_upstream", linear_dtype="float8")
    assert command.endswith(" --fp8-format hybrid --fp8-recipe tensorwise")
    monkeypatch.setattr(MegatronLM, "place", InstallPlace(system="megatron_lm", flavour="paper"))
    trial = settings("megatron_lm_upstream", linear_dtype="float8")
    found = str(method_named("megatron_lm_upstream").refuse(trial))
    assert "is the paper's copy here, which has no tensorwise scaling, found linear_dtype float8; set it to" in found


@pytest.mark.parametrize(
    ("method", "words", "reason"),
    [
        ("megatron_lm_upstream", "block", "takes block N or modules NAME,... or offload N as checkpoint.upstream"),
        ("megatron_lm_upstream", "modules moe", "found 'modules moe'"),
        ("megatron_lm_upstream", "block 17", "can block at most 16 of the 16 layers"),
        ("megatron_lm_upstream", "offload 16", "can offload at most 15 of the 16 layers"),
        ("torchtitan_upstream", "budget 2", "takes every N or budget SHARE as checkpoint.upstream"),
        ("deepspeed_upstream", "budget 0.5", "takes offload as checkpoint.upstream, found 'budget 0.5'"),
        ("transformers_upstream", "offload", "takes nothing as checkpoint.upstream, found 'offload'"),
        ("burst", "offload", "burst has no choice of checkpoint.upstream, found 'offload'; leave it out"),
        ("megatron_cp", "block 8", "megatron_cp has no choice of checkpoint.upstream"),
    ],
)
def test_what_a_system_cannot_recompute_is_refused_in_one_sentence(
    method: str, words: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MegatronLM, "place", InstallPlace(system="megatron_lm", flavour="current"))
    trial = replace(settings("megatron_lm_upstream", checkpoint=Checkpoint(upstream=words)), method=method)
    assert reason in str(method_unsupported_reason(method_named(method), trial))


@pytest.mark.parametrize(
    ("method", "changes", "expected"),
    [
        ("deepspeed_upstream", {"task": "attention"}, {"heads": 16, "cp_size": 4, "steps": 4}),
        ("burst_attention_upstream", {}, {"dtype": "bf16", "call": "BASELINES/burst_attention/call.py"}),
    ],
)
def test_attention_functions_of_other_pythons_are_called_by_one_program(
    method: str, changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    command, _, files = rendered(method, cp_size=4, **changes)
    assert command == "UPSTREAM/env/bin/python -u BASELINES/programs/attention.py /T/attention.json"
    assert expected.items() <= json.loads(files["attention.json"]).items()


def test_the_requests_of_transformers_trainers() -> None:
    command, _, files = rendered("deepspeed_upstream", task="train", cp_size=2, mlp_tiles=4, optimizer_offload=True)
    assert command == "UPSTREAM/env/bin/python -u BASELINES/programs/train_transformers.py /T/attention.json"
    request = json.loads(files["attention.json"])
    assert (request["engine"], request["loss_tiles"], request["mlp_tiles"]) == ("deepspeed", 2, 4)
    assert request["offload"] is False
    offloaded = {"device": "cpu", "pin_memory": True, "ratio": 1.0}
    assert request["deepspeed"]["zero_optimization"]["offload_optimizer"] == offloaded
    _, _, files = rendered("deepspeed_upstream", task="train", cp_size=2, optimizer_offload=0.4)
    zero = json.loads(files["attention.json"])["deepspeed"]["zero_optimization"]
    assert zero["offload_optimizer"] == offloaded | {"ratio": 0.4}
    inputs = {"task": "train", "checkpoint": Checkpoint(every=1, tail=0, upstream="offload")}
    _, _, files = rendered("deepspeed_upstream", **inputs)
    assert json.loads(files["attention.json"])["offload"] is True
    kept = settings("deepspeed_upstream", task="train", checkpoint=Checkpoint(every=0, upstream="offload"))
    reason = method_named("deepspeed_upstream").refuse(kept)
    assert "inputs of recomputed layers, found checkpoint.upstream offload and checkpoint.every 0" in str(reason)
    alone = settings("deepspeed_upstream", task="attention", checkpoint=Checkpoint(upstream="offload"))
    assert "recomputes in task train alone, found task attention" in str(
        method_named("deepspeed_upstream").refuse(alone)
    )
    part = settings("megatron_deepspeed_upstream", cp_size=8, optimizer_offload=0.4)
    reason = method_named("megatron_deepspeed_upstream").refuse(part)
    assert "moves the whole optimizer to the host or none of it, found optimizer_offload 0.4" in str(reason)
    _, _, files = rendered("trl_upstream", kernel="cudnn")
    request = json.loads(files["attention.json"])
    assert (request["engine"], request["kernel"], request["tokens"]) == ("trl", "cudnn", "/T/tokens/tokens.bin")
    assert (request["recompute"], request["offload"]) == (True, False)
    _, _, files = rendered("trl_upstream", checkpoint=Checkpoint(tail=0, upstream="offload"))
    request = json.loads(files["attention.json"])
    assert (request["recompute"], request["offload"]) == (True, True)


@pytest.mark.parametrize(
    ("method", "dtype", "weights"),
    [
        ("transformers_upstream", "bf16", "fp32"),
        ("transformers_upstream", "fp32", "fp32"),
        ("transformers_bf16_upstream", "bf16", "bf16"),
    ],
)
def test_the_two_forms_of_transformers_differ_in_the_dtype_of_their_weights(
    method: str, dtype: str, weights: str
) -> None:
    command, environment, files = rendered(method, kernel="fa4", dtype=dtype)
    assert command == "UPSTREAM/env/bin/python -u BASELINES/programs/train_transformers.py /T/attention.json"
    assert environment == {"HF_HUB_OFFLINE": "1", "TORCH_EXTENSIONS_DIR": "UPSTREAM/extensions"}
    request = json.loads(files["attention.json"])
    assert (request["engine"], request["weights"], request["products"]) == ("plain", weights, dtype)
    assert (request["kernel"], request["recompute"]) == ("fa4", True)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"cp_size": 2}, "transformers_upstream keeps sequences whole, found cp_size 2; set cp_size to 1"),
        ({"world_size": 2}, "transformers_upstream runs on one rank, found world_size 2; set world_size to 1"),
        (
            {"checkpoint": Checkpoint(every=1, tail=1)},
            "transformers_upstream recomputes nothing or each layer whole, found checkpoint.every 1 and tail 1; set "
            "every to 0, or every to 1 and tail to 0",
        ),
        (
            {"model": replace(SHAPE, gated=False)},
            "transformers_upstream trains transformers' Llama or Qwen3.5, and 1b is another model; choose a Llama or "
            "Qwen3.5",
        ),
        (
            {"model": named_model("mamba_1b")},
            "transformers_upstream has no kernels of Mamba-2, for which transformers needs mamba_ssm, found model "
            "mamba_1b; choose a model with gated delta nets",
        ),
        (
            {"model": named_model("hybrid_1b"), "mask": "documents:1k,..."},
            "transformers_upstream keeps packed documents of linear layers apart only with causal-conv1d, found mask "
            "documents:1k,...; set mask to causal",
        ),
    ],
)
def test_what_transformers_cannot_run_is_refused_with_the_value_to_change(
    changes: dict[str, Any], expected: str
) -> None:
    assert method_named("transformers_upstream").refuse(settings("transformers_upstream", **changes)) == expected


TORCH_CHOOSES = "unknown (torch's scaled_dot_product_attention chooses)"
TE_CHOOSES = "unknown (TransformerEngine chooses)"
# System, flavour, settings, variables of its environment, and what its record says.
KERNELS: list[tuple[str, str, dict[str, Any], dict[str, str], str]] = [
    ("megatron_lm", "current", {}, {}, "cudnn"),
    ("megatron_lm", "paper", {}, {}, TE_CHOOSES),
    ("megatron_lm", "paper", {}, {"NVTE_FLASH_ATTN": "0"}, "cudnn"),
    ("megatron_lm", "paper", {}, {"NVTE_FUSED_ATTN": "0"}, "fa2"),
    ("megatron_lm", "paper", {}, {"NVTE_FLASH_ATTN": "0", "NVTE_FUSED_ATTN": "0"}, TE_CHOOSES),
    ("megatron_deepspeed", "paper", {}, {}, "fa2"),
    ("internevo", "paper", {}, {}, "fa2"),
    ("burst_engine", "paper", {}, {}, "fa2, the fork of flash-attention in the artifact"),
    ("burst_attention", "paper", {}, {}, "fa2"),
    ("torchtitan", "current", {}, {}, "torch: cudnn, else flash, else math"),
    ("torchtitan", "current", {"kernel": "fa4"}, {}, "fa4"),
    ("trl", "current", {}, {}, TORCH_CHOOSES),
    ("trl", "current", {"kernel": "cudnn"}, {}, "torch: cudnn, else flash, else efficient, else math"),
    ("trl", "current", {"kernel": "fa4"}, {}, "fa4"),
    ("transformers", "current", {}, {}, TORCH_CHOOSES),
    ("transformers", "current", {"kernel": "fa4"}, {}, "fa4"),
    ("transformers_bf16", "current", {"kernel": "fa4"}, {}, "fa4"),
    ("transformers_padded", "current", {"kernel": "fa4"}, {}, "fa4"),
    ("deepspeed", "current", {}, {}, TORCH_CHOOSES),
    ("deepspeed", "current", {"kernel": "cudnn"}, {}, "torch: cudnn, else flash, else efficient, else math"),
    ("deepspeed", "current", {"kernel": "fa4"}, {}, "fa4"),
    ("deepspeed", "current", {"task": "attention"}, {}, TORCH_CHOOSES),
]


@pytest.mark.parametrize(("system", "flavour", "changes", "environment", "expected"), KERNELS)
def test_a_system_says_with_which_kernel_it_attends_or_why_that_is_unknown(
    system: str, flavour: Any, changes: dict[str, Any], environment: dict[str, str], expected: str
) -> None:
    method: Upstream = method_named(f"{system}_upstream")  # type: ignore[assignment]
    trial = settings(method.name, **changes)
    assert method.kernel(trial, InstallPlace(system=system, flavour=flavour), environment) == expected


def test_the_kernel_of_every_system_that_runs_outside_of_the_engines_worker_is_in_the_table() -> None:
    outside = {name for name in UPSTREAM if not isinstance(method_named(name), InWorker)}
    assert {f"{system}_upstream" for system, *_ in KERNELS} == outside


def test_the_release_of_megatron_lm_switches_every_kernel_off_but_cudnns() -> None:
    assert " --attention-backend fused " in rendered("megatron_lm_upstream", flavour="current")[0]


@pytest.mark.parametrize(
    ("seconds_between", "told", "expected"),
    [
        (0.0, [(False, False), (True, False), (True, False), (True, True)], 3),  # the last look while steps ran
        (99.0, [(False, False), (True, False), (True, False), (True, True)], 1),  # once in the steps, and not again
        (
            99.0,
            [(False, False), (True, True), (True, True)],
            1,
        ),  # all steps between two looks: when they are told
        (99.0, [(False, False)], 1),  # nothing was told: right after the end
    ],
)
def test_a_gpu_is_looked_at_before_the_program_and_last_during_its_steps(
    monkeypatch: pytest.MonkeyPatch, seconds_between: float, told: list[tuple[bool, bool]], expected: int
) -> None:
    monkeypatch.setattr("baselines.drive._GPU_LOOK_SECONDS", seconds_between)
    looks = iter(range(100))
    watch = GpuWatch(lambda: GpuReading(digest="ab", driver="580.1", state=GpuState(sm_mhz=next(looks))))
    for began, ended in told:
        watch.while_running(began, ended)
    seen = watch.seen()
    assert (seen.digest, seen.driver) == ("ab", "580.1")
    assert (seen.before.sm_mhz, seen.after.sm_mhz) == (0, expected)


HEAD = (
    " [2026-01-01 00:00:00.000000] iteration {:8d}/{:8d} | consumed samples: {:12d} | "
    "elapsed time per iteration (ms): {:.1f} | "
)
END = "lm loss: {:.6E} | loss scale: {:.1f} | grad norm: {:.3f} | number of skipped iterations: {:3d} |"


def megatron_line(step: int, milliseconds: float, tokens: str = "") -> str:
    speed = f"throughput per GPU (TFLOP/s/GPU): {378.7:.1f} | "
    return HEAD.format(step, 3, step, milliseconds) + speed + tokens + END.format(5.39693, 1.0, 18.805, 0) + "\n"


def test_real_lines_of_megatron_lm() -> None:
    """As release 0.19 printed them on one H200 at 64K tokens, other lines between them."""
    head = " [2026-11-21 22:05:{}] iteration        {}/       6 | consumed samples:            {} | "
    tail = (
        "throughput per GPU (TFLOP/s/GPU): {} | learning rate: 1.000000E-05 | global batch size:     1 | lm loss: {} | "
        "loss scale: 1.0 | grad norm: {} | number of skipped iterations:   0 | number of nan iterations:   0 |\n"
    )
    memory = (
        "Theoretical memory footprints: weight and optimizer=19531.16 MB, activation=77717.32 MB, total=97248.49 MB\n"
        "[Rank 0] (after 3 iterations) memory (MB) | allocated: 19904.17 | max allocated: 65063.49 | "
        "reserved: 68204.00 | max reserved: 68204.00\n"
    )
    text = ""
    for second, step, milliseconds, speed, loss, norm in (
        ("17.291212", 2, "10901.1", "116.1", "9.960249E+00", "19.729"),
        ("20.008215", 3, "2716.9", "466.0", "6.834952E+00", "18.175"),
        ("22.712631", 4, "2704.3", "468.1", "5.545793E+00", "17.635"),
    ):
        text += head.format(second, step, step) + f"elapsed time per iteration (ms): {milliseconds} | "
        text += tail.format(speed, loss, norm) + memory
    printed = method_named("megatron_lm_upstream").parse(text)  # type: ignore[attr-defined]
    assert printed.step_seconds == pytest.approx([10.9011, 2.7169, 2.7043])
    assert printed.loss == [9.960249, 6.834952, 5.545793]
    assert printed.grad_norm == [19.729, 18.175, 17.635]
    assert printed.peak_allocated_bytes == [int(65063.49 * 2**20)]
    assert printed.own == {"throughput per GPU (TFLOP/s/GPU)": 468.1}


def test_real_lines_of_torchtitan() -> None:
    """As release 0.2.2 printed them on one H200 at 16K tokens, with what our program adds."""
    log = "[titan] 2026-11-21 21:56:{} - root - INFO - {}\n"
    text = log.format("36,171", "Successfully created meshes with active dimensions: []")
    for second, step, peak in (
        ("36,276", "step:  1  loss: 10.86783  grad_norm:  0.7018  memory: 17.15GiB(12.27%)  tps: 5,024  tflops: 64.69  mfu: 6.54%", 1),  # noqa: E501
        ("37,021", "step:  2  loss: 10.86279  grad_norm:  0.7016  memory: 24.04GiB(17.20%)  tps: 22,035  tflops: 283.71  mfu: 28.69%", 2),  # noqa: E501
        ("37,358", "step:  3  loss: 10.85830  grad_norm:  0.7015  memory: 24.04GiB(17.20%)  tps: 48,694  tflops: 626.98  mfu: 63.40%", 3),  # noqa: E501
    ):  # fmt: skip
        text += 'UPSTREAM {"peak_allocated_bytes": [' + str(peak << 30) + "]}\n" + log.format(second, step)
    printed = method_named("torchtitan_upstream").parse(text)  # type: ignore[attr-defined]
    assert printed.tokens_per_gpu_per_second == [5024.0, 22035.0, 48694.0]
    assert printed.loss == [10.86783, 10.86279, 10.8583]
    assert (printed.peak_allocated_bytes, printed.peak_reserved_bytes) == ([3 << 30], [int(24.04 * 2**30)])
    assert printed.own == {"tps": 48694.0, "tflops": 626.98, "mfu": 63.4}


def test_lines_of_the_artifacts_megatron_lm_and_of_megatron_deepspeed() -> None:
    text = megatron_line(1, 250.0, f"Token per GPU (Tokens/s/GPU): {4096.25:.1f} | ")
    printed = method_named("megatron_lm_upstream").parse(text)  # type: ignore[attr-defined]
    assert printed.own["Token per GPU (Tokens/s/GPU)"] == 4096.2
    tail = (
        f" samples per second: {0.25:.3f} | tokens per gpu per second (tgs): {1024.5:.3f} | TFLOPs: {150.25:.2f} |"
        f" Max Mem: {61.44:.2f} GB |"
    )
    text = HEAD.format(1, 3, 1, 250.0) + END.format(5.5, 1.0, 2.0, 0) + tail
    printed = method_named("megatron_deepspeed_upstream").parse(text)  # type: ignore[attr-defined]
    assert (list(printed.step_seconds), list(printed.loss)) == ([0.25], [5.5])
    assert printed.own == {
        "samples per second": 0.25, "tokens per gpu per second (tgs)": 1024.5, "TFLOPs": 150.25, "Max Mem": 61.44
    }  # fmt: skip


def test_lines_of_internevo() -> None:
    infos = {
        "tflops": 151.25, "step": 0, "loss": 11.25, "real_tgs": 1000.0, "tgs (tokens/gpu/second)": 2048.0,
        "tgs/last_tgs_1": 2040.5, "tgs/tgs_all": 1000.1, "lr": 1e-05, "loss_scale": 65536.0, "grad_norm": 3.5,
        "num_consumed_tokens": 16384, "fwd_bwd_time": 7.5, "bwd_time": 5.1,
    }  # fmt: skip
    line = "".join(f"{key}={value} " for key, value in infos.items())
    printed = method_named("internevo_upstream").parse(f"2026-01-01 INFO pipeline.py:860 in record -- {line}\n")  # type: ignore[attr-defined]
    assert printed.tokens_per_gpu_per_second == [2048.0]
    assert (printed.loss, printed.grad_norm) == ([11.25], [3.5])
    assert printed.own["fwd_bwd_time"] == 7.5  # without the optimizer, so no time of a step


def test_lines_of_the_artifacts_burstengine() -> None:
    line = "|mem_train_allocated: {:.4f} |mem_train_reserved: {:.4f} | train: {:.4f} | tflops: {:.2f} | toks: {:.2f} |"
    text = f"loss {10.5:.4f} grad_norm {2.25:.4f}\n" + line.format(40.5, 44.25, 12.5, 180.5, 300.25) + "\n"
    printed = method_named("burst_engine_upstream").parse(text)  # type: ignore[attr-defined]
    assert (printed.step_seconds, printed.loss, printed.grad_norm) == ([12.5], [10.5], [2.25])
    assert printed.own["toks"] == 300.25


def test_lines_of_torchtitan_in_colour() -> None:
    line = "step: {:2}  loss: {:8.5f}  grad_norm: {:7.4f}  memory: {:5.2f}GiB({:.2f}%)  tps: {:,}  tflops: {:,.2f}  mfu: {:.2f}%"  # noqa: E501
    values = (10.8626, 0.7016, 24.04, 17.2, 48694, 1626.98, 63.4)
    text = "".join(
        f"[titan] 2026-01-01 - root - INFO - \x1b[31m{line.format(step, *values)}\x1b[39m\n" for step in (1, 2)
    )
    printed = method_named("torchtitan_upstream").parse(text)  # type: ignore[attr-defined]
    assert printed.tokens_per_gpu_per_second == [48694.0, 48694.0]
    assert (printed.loss, printed.grad_norm) == ([10.8626] * 2, [0.7016] * 2)
    assert printed.peak_reserved_bytes == [int(24.04 * 2**30)]
    assert printed.own == {"tps": 48694.0, "tflops": 1626.98, "mfu": 63.4}


def finished(trial_dir: Path, trial: TrialSettings, *logs: str) -> Path:
    """What a trial leaves: its settings, what was started, and a log of each rank."""
    ran = {"flavour": "current", "pin": "ab", "commit": "", "command": ["x"], "environment": {}, "device": "a GPU"}
    write_json(trial_dir / "trial.json", {"settings": to_json(trial), "method": "baselines.megatron_lm"})
    write_json(trial_dir / "upstream.json", ran)
    (trial_dir / "logs").mkdir()
    for rank, text in enumerate(logs):
        (trial_dir / "logs" / f"rank{rank}.log").write_text(text)
    return trial_dir


def test_a_measurement_holds_raw_steps_and_the_systems_own_print_beside_them(tmp_path: Path) -> None:
    trial = settings("megatron_lm_upstream", cp_size=2, steps=Steps(warmup=1, measured=2))
    lines = [megatron_line(step, 1000.0 * step) for step in (1, 2, 3, 4)]
    finished(tmp_path, trial, "nothing\n", "".join(lines))  # the last rank prints
    found = method_named("megatron_lm_upstream").read(tmp_path)
    assert found.step_seconds == [3.0, 4.0]  # after two of warm-up, since its second time is an average
    assert len(found.loss) == 4
    assert found.device == "a GPU"
    assert found.extra["upstream"]["printed"] == {"throughput per GPU (TFLOP/s/GPU)": 378.7}


def test_steps_of_another_system_are_measured_when_two_of_them_have_agreed(tmp_path: Path) -> None:
    trial = settings("megatron_lm_upstream", cp_size=2, steps=Steps(warmup=1, settle=3, measured=2))
    times = [9000.0, 8000.0, 4000.0, 2000.0, 2010.0, 5000.0, 6000.0]  # two steps of warm-up are its own
    finished(tmp_path, trial, "".join(megatron_line(step, each) for step, each in enumerate(times, 1)))
    found = method_named("megatron_lm_upstream").read(tmp_path)
    assert found.step_seconds == [5.0, 6.0]
    assert found.extra["warm_up"] == {"steps": 5, "settled": True}
    assert len(found.loss) == len(times)


def test_steps_of_a_system_that_prints_speeds_follow_from_the_tokens(tmp_path: Path) -> None:
    line = "step: 1  loss: 1.0  grad_norm: 1.0  memory: 1.0GiB(1.0%)  tps: 4,096  tflops: 1.0  mfu: 1.0%\n"
    trial = settings("torchtitan_upstream", cp_size=2, steps=Steps(warmup=0, measured=1))
    assert method_named("torchtitan_upstream").read(finished(tmp_path, trial, 3 * line)).step_seconds == [2.0]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (megatron_line(1, 1.0), "printed 1 steps, expected 3"),
        (3 * megatron_line(1, 1.0).replace("5.396930E+00", "nan"), "printed loss nan, expected a finite number"),
    ],
)
def test_a_log_that_is_no_measurement_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    trial = settings("megatron_lm_upstream", steps=Steps(warmup=0, measured=1))
    with pytest.raises(ValueError, match=expected):
        method_named("megatron_lm_upstream").read(finished(tmp_path, trial, text))


def test_a_foreign_program_sees_its_own_packages_alone() -> None:
    given = {"PATH": "/usr/bin", "PYTHONPATH": "/ours", "VIRTUAL_ENV": "/ours", "NCCL_IB_HCA": "mlx5_0", "A": "1"}
    given |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1", "TORCH_FR_BUFFER_SIZE": "2000"}  # the launcher's
    assert foreign_environment(given, {"A": "2"}, [Path("/T/bin"), Path("/U/bin")]) == {
        "PATH": "/T/bin:/U/bin:/usr/bin", "NCCL_IB_HCA": "mlx5_0", "A": "2", "PYTHONNOUSERSITE": "1"
    }  # fmt: skip


def test_a_system_that_is_gone_on_a_host_is_refused_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = method_named("internevo_upstream").place  # type: ignore[attr-defined]
    if place.condition()[0] == "installed":
        pytest.skip("InternEvo is installed here")
    trial = {"settings": to_json(settings("internevo_upstream")), "method": "baselines.internevo"}
    write_json(tmp_path / "trial.json", trial)
    monkeypatch.setenv("RANK", "3")
    assert drive([str(tmp_path)]) == 1
    error = json.loads((tmp_path / "errors" / "rank3.json").read_text())
    assert error["kind"] == "refused"
    assert "burst setup baselines install internevo --flavour paper" in error["reason"]

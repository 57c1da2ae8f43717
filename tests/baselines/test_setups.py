"""The paper's set-ups: commands, environments and files of each node as whole strings, and what `as_published` adds."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from baselines import setups
from baselines.drive import as_its_script
from baselines.handicaps import Handicaps, handicaps
from baselines.upstream import Rendered
from cluster.files.errors import UsageError
from cluster.inventory.site import Site, load_site
from engine.settings import TrialSettings
from harness.cli import main as burst
from harness.spec.methods import all_methods
from harness.spec.models import MODELS_DIR, load_model

PAPER: Site = load_site(MODELS_DIR.parent / "sites" / "paper.yaml")
NCCL = {"NCCL_IB_QPS_PER_CONNECTION": "8", "NCCL_MIN_NCHANNELS": "4", "NCCL_NCHANNELS_PER_NET_PEER": "4"}


@dataclass(frozen=True, kw_only=True)
class Published(TrialSettings):
    """A trial that is run as the paper's was."""

    settings: Any = "as_published"


def trial(system: str, model: str = "7b", cp_size: int = 32, nodes: int = 4, seq_len: int = 1 << 20) -> TrialSettings:
    shape = load_model(MODELS_DIR / f"{model}.yaml")
    return setups.trial(system, shape, cp_size=cp_size, nodes=nodes, seq_len=seq_len, as_published=False)


def published(system: str, model: str = "7b") -> TrialSettings:
    found = trial(system, model, cp_size=8)
    values = {each.name: getattr(found, each.name) for each in dataclasses.fields(found)}
    return Published(**values | {"settings": "as_published"})


def rendered(system: str, settings: TrialSettings, nodes: int = 4) -> list[setups.NodeSetup]:
    return setups.render(system, settings, PAPER, nodes=nodes, head="node1")


HEAD = "/burst/baselines/{package}/upstream/paper/env/bin/python -m torch.distributed.run --nnodes 4 --nproc-per-node 8 --node-rank {node} --rdzv-id 1 --rdzv-backend c10d --rdzv-endpoint node1:29500 /burst/baselines/{package}/upstream/paper/source/{program} "  # noqa: E501
MEGATRON_LM = (
    "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --kv-channels 128 "
    "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 --seq-length 1048576 "
    "--max-position-embeddings 1048576 --tokenizer-type NullTokenizer --vocab-size 31999 "
    "--make-vocab-size-divisible-by 128 --mock-data --no-create-attention-mask-in-dataloader --num-workers 1 "
    "--micro-batch-size 1 --global-batch-size 1 --train-iters 10 --eval-iters 0 --eval-interval 1000 --bf16 "
    "--use-distributed-optimizer --lr 6e-05 --clip-grad 1.0 --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--seed 1 --context-parallel-size 32 --tensor-model-parallel-size 1 --pipeline-model-parallel-size 1 "
    "--transformer-impl transformer_engine --log-interval 1 --log-throughput --use-rotary-position-embeddings "
    "--lr-decay-style cosine --min-lr 6e-06 --init-method-std 0.006 --use-flash-attn --timing-log-level 0 --causal "
    "--causal-tflops --method megatron-cp --log-file /burst/paper-setup/megatron.txt --swiglu --sequence-parallel "
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
)
DEEPSPEED = (
    "--tensor-model-parallel-size 1 --no-pipeline-parallel --ds-sequence-parallel-size 32 --num-layers 32 "
    "--hidden-size 4096 --ffn-hidden-size 11008 --num-attention-heads 32 --seq-length 1048576 "
    "--max-position-embeddings 1048576 --micro-batch-size 1 --global-batch-size 1 --train-iters 10 --eval-iters 0 "
    "--eval-interval 1000 --tokenizer-type NullTokenizer --vocab-size 31999 --data-path "
    "/data/codeparrot_content_document --data-impl mmap --split 98,2,0 --num-workers 0 --lr 2e-05 --min-lr 1e-6 "
    "--lr-decay-style cosine --weight-decay 0.1 --clip-grad 1.0 --adam-beta1 0.9 --adam-beta2 0.95 "
    "--init-method-std 0.006 --hysteresis 2 --seed 1 --bf16 --use-rotary-position-embeddings --normalization rmsnorm "
    "--disable-bias-linear --swiglu --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0 "
    "--no-query-key-layer-scaling --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion "
    "--no-gradient-accumulation-fusion --no-async-tensor-model-parallel-allreduce --use-flash-attn-v2 "
    "--zero-reduce-scatter --log-interval 1 --timing-log-level 0 --deepspeed --deepspeed_config "
    "/burst/paper-setup/ds_config.json --zero-stage 3 --checkpoint-activations --deepspeed-activation-checkpointing "
    "--cpu-optimizer"
)
LLAMA = "/burst/baselines/burst_engine/upstream/paper/source/BurstEngine/apps/llama"
BURST = (
    "--model-config /burst/paper-setup/config.json --vocab " + LLAMA + "/config/70b/vocab.txt --tokenizer-path "
    "/burst/baselines/burst_engine/upstream/paper/source/llama-7b/ --dataset /burst/paper-setup/dataset.json "
    "--train-iters 400000 --lr 0.00015 --inspect-iters 100 --warmup-iters 2000 --lr-decay-style noam "
    "--weight-decay 0.1 --clip-grad 1.0 --loss-scale 1048576 --start-step 1 --bf16 --batch-size 1 "
    "--max-length 1048576 --tp 32 --sp burst_sl_loss_sl_ckpt --flash cuda --spzero --ckpt --offload"
)
INTERNEVO = "--config /burst/paper-setup/internevo_config.py --seed 0"


@pytest.mark.parametrize(
    ("system", "package", "program", "words", "folder", "files"),
    [
        ("megatron_lm", "megatron_lm", "pretrain_gpt.py", MEGATRON_LM, "/burst/paper-setup", []),
        (
            "megatron_deepspeed", "megatron_deepspeed", "pretrain_gpt.py", DEEPSPEED, "/burst/paper-setup",
            ["ds_config.json"],
        ),
        ("internevo_double_ring", "internevo", "train.py", INTERNEVO, "/burst/paper-setup", ["internevo_config.py"]),
        ("internevo_usp", "internevo", "train.py", INTERNEVO, "/burst/paper-setup", ["internevo_config.py"]),
        (
            "burst_engine", "burst_engine", "BurstEngine/apps/llama/pretrain_llama_hug_tokenizer.py", BURST, LLAMA,
            ["config.json", "dataset.json"],
        ),
    ],
)  # fmt: skip
def test_each_node_of_the_paper_gets_its_command(
    system: str, package: str, program: str, words: str, folder: str, files: list[str]
) -> None:
    found = rendered(system, trial(system))
    assert [each.node for each in found] == [0, 1, 2, 3]
    for each in found:
        head = HEAD.format(package=package, program=program, node=each.node)
        assert " ".join(each.command) == head + words
        assert each.folder == folder
        assert sorted(each.files) == [f"/burst/paper-setup/{name}" for name in files]


ENVIRONMENT = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "GLOO_SOCKET_IFNAME": "bond0",
    "NCCL_IB_HCA": "=mlx5_2,mlx5_3,mlx5_5,mlx5_6",
    "NCCL_SOCKET_IFNAME": "=bond0",
    "OMP_NUM_THREADS": "8",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TORCH_FR_BUFFER_SIZE": "2000",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
}
_OWN = {"TORCH_EXTENSIONS_DIR", "LOG_FILE", "TOK_PATH", "FLASH_ATTENTION_FORCE_BUILD", "DS_BUILD_OPS"}  # of one system


@pytest.mark.parametrize("system", setups.SETUPS)
def test_every_system_gets_one_nccl_setting(system: str) -> None:
    environment = rendered(system, trial(system))[0].environment
    assert {name: value for name, value in environment.items() if name not in _OWN} == ENVIRONMENT | NCCL


@pytest.mark.parametrize(
    ("system", "expected"),
    [
        ("megatron_lm", {"NCCL_IB_QPS_PER_CONNECTION": "8"}),
        ("megatron_deepspeed", {}),
        ("internevo_double_ring", {}),
        ("internevo_usp", {}),
        ("burst_engine", NCCL),
    ],
)
def test_as_published_each_system_has_the_nccl_setting_of_its_own_script(system: str, expected: dict[str, str]) -> None:
    environment = rendered(system, published(system), nodes=1)[0].environment
    assert {name: value for name, value in environment.items() if name in NCCL} == expected


def test_a_trial_as_published_runs_with_the_nccl_setting_of_its_own_script() -> None:
    settings = published("megatron_lm")
    everyones = {"NCCL_IB_QPS_PER_CONNECTION": "2", "NCCL_MIN_NCHANNELS": "4", "NCCL_SOCKET_IFNAME": "=bond0"}
    program = Rendered(command=("program",), environment={"OWN": "1"})
    made, given = as_its_script(settings, program, everyones)
    assert given == {"NCCL_IB_QPS_PER_CONNECTION": "8", "NCCL_SOCKET_IFNAME": "=bond0"}
    assert made.environment == {"OWN": "1", "NCCL_IB_QPS_PER_CONNECTION": "8"}
    made, given = as_its_script(trial("megatron_lm"), program, everyones)
    assert given == everyones
    assert made.environment["NCCL_MIN_NCHANNELS"] == "4"


def test_as_published_megatron_lm_has_barriers_and_a_wider_mlp() -> None:
    command = " ".join(rendered("megatron_lm", published("megatron_lm"), nodes=1)[0].command)
    assert " --timing-log-level 2 " in command
    assert " --ffn-hidden-size 16384 " in command
    assert " --vocab-size 50303 " in command
    other = " ".join(rendered("megatron_lm", published("megatron_lm", "14b"), nodes=1)[0].command)
    assert " --ffn-hidden-size 13824 " in other


def test_as_published_megatron_deepspeed_computes_in_fp16_with_a_large_vocabulary() -> None:
    found = rendered("megatron_deepspeed", published("megatron_deepspeed"), nodes=1)[0]
    command, config = " ".join(found.command), json.loads(found.files["/burst/paper-setup/ds_config.json"])
    assert " --fp16 " in command
    assert " --vocab-size 119999 " in command
    assert config["fp16"] == {
        "enabled": True, "loss_scale": 0, "loss_scale_window": 500, "hysteresis": 2, "min_loss_scale": 1,
        "initial_scale_power": 11,
    }  # fmt: skip
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 32
    equal = rendered("megatron_deepspeed", trial("megatron_deepspeed"))[0]
    config = json.loads(equal.files["/burst/paper-setup/ds_config.json"])
    assert config["bf16"] == {"enabled": True}
    assert config["zero_optimization"]["zero_hpz_partition_size"] == 8


def test_as_published_internevo_has_no_memory_pool_and_burstengine_no_gate() -> None:
    found = rendered("internevo_usp", published("internevo_usp"), nodes=1)[0]
    assert "memory_pool=False" in found.files["/burst/paper-setup/internevo_config.py"]
    equal = rendered("internevo_usp", trial("internevo_usp"))[0].files["/burst/paper-setup/internevo_config.py"]
    assert "memory_pool=True" in equal
    assert "head_size=4, context_size=8, window_size=8" in equal
    burst_engine = rendered("burst_engine", published("burst_engine"), nodes=1)[0]
    assert json.loads(burst_engine.files["/burst/paper-setup/config.json"])["activate_fn"] == "gelu"


@pytest.mark.parametrize(("cp_size", "nodes"), [(8, 1), (16, 2), (32, 4), (64, 8)])
@pytest.mark.parametrize("model", ["7b", "14b"])
@pytest.mark.parametrize("system", setups.SETUPS)
def test_the_papers_sizes_are_rendered_or_refused_in_one_sentence(
    system: str, model: str, cp_size: int, nodes: int
) -> None:
    heads = 32 if model == "7b" else 40
    if system == "megatron_deepspeed" and heads % cp_size:
        with pytest.raises(UsageError, match="needs heads divisible by cp_size"):
            trial(system, model, cp_size, nodes)
        return
    found = rendered(system, trial(system, model, cp_size, nodes), nodes)
    assert len(found) == nodes
    assert {each.environment["NCCL_MIN_NCHANNELS"] for each in found} == {"4"}


def test_ranks_that_do_not_divide_are_refused() -> None:
    with pytest.raises(UsageError, match="--cp is 24, and 4 nodes have 32 GPUs; choose a --cp that divides 32"):
        trial("burst_engine", cp_size=24)


def test_the_script_of_a_node_hands_over_every_word_and_file_unchanged(tmp_path: Path) -> None:
    told = tmp_path / "told"
    awkward = "a 'quoted' $HOME `date` =word\nand a line"
    setup = setups.NodeSetup(
        node=0,
        nodes=1,
        environment={"OWN": awkward},
        command=("sh", "-c", 'printf "%s|" "$OWN" "$@" > told', "sh", awkward, "plain"),
        folder=str(tmp_path),
        files={str(tmp_path / "below" / "a file"): awkward},
    )
    subprocess.run(["sh"], input=setups.script(setup), text=True, check=True, cwd="/", timeout=60)
    assert told.read_text() == f"{awkward}|{awkward}|plain|"
    assert (tmp_path / "below" / "a file").read_text() == awkward


def test_every_handicap_names_its_source_and_a_method_that_exists() -> None:
    for field in dataclasses.fields(Handicaps):
        assert field.name in all_methods()
        assert handicaps(field.name)
        for one in handicaps(field.name):
            assert one.what
            assert one.source.startswith(("evaluation/baselines/", "BurstEngine/"))


def test_the_command_prints_a_script_for_each_node(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        burst(["setup", "baselines", "show", "burst_engine", "--cp", "16", "--root", "/srv/burst", "--head", "gpu01"])
        == 0
    )
    out, err = capsys.readouterr()
    assert out.count("# node ") == 2
    assert "--rdzv-endpoint gpu01:29500" in out
    assert "> /srv/burst/paper-setup/config.json" in out
    assert "one step alone" in err
    assert burst(["setup", "baselines", "show", "megatron_lm", "--cp", "8", "--json"]) == 0
    assert [each["node"] for each in json.loads(capsys.readouterr().out)] == [0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nothing"], "there is no set-up of the paper for nothing"),
        (["burst_engine", "--model", "8t"], "--model is 8t; choose one of"),
        (["burst_engine", "--nodes", "0"], "--nodes is 0; expected 1 to 4096"),
        (["burst_engine", "--seq-len", "long"], "--seq-len: 'long' is not a length"),
        (["burst_engine", "--root", "here"], "--root is here; expected an absolute path"),
        (["burst_engine", "--cp", "0"], "--cp is 0"),
    ],
)
def test_wrong_words_are_refused_in_one_sentence(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert burst(["setup", "baselines", "show", *words]) == 2
    assert expected in capsys.readouterr().err

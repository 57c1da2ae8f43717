"""Training steps replayed as CUDA graphs: when they may be, and that every number equals that of launched steps."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from engine.burst import METHOD
from engine.data import open_tokens
from engine.data.sequences import Sequences
from engine.distributed import arrange
from engine.lm_head.loss_kernel import IGNORE
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape
from engine.tasks import cuda_graph
from engine.tasks.train import TrainTask
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=2, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=64, vocab=259)
SETTINGS = TrialSettings(task="train", method="burst", model=SHAPE, seq_len=512, cuda_graph="step")
OBSTACLES: dict[str, dict[str, object]] = {
    "2 ranks exchange tensors": {"world_size": 2},
    "states are in host memory": {"optimizer_offload": True},
    "the kernel of optimizer_states 8bit": {"optimizer_states": "8bit"},
    "saved tensors go to host memory": {"checkpoint": Checkpoint(offload="inputs")},
    "dtype fp64": {"dtype": "fp64"},
    "loss_kernel liger reads the labels": {"loss_kernel": "liger"},
    "warmup_seq_len 256": {"steps": Steps(warmup_seq_len=256)},
    "steps.warmup is 0": {"steps": Steps(warmup=0)},
}


def changed(**values: object) -> TrialSettings:
    return dataclasses.replace(SETTINGS, **values)


@pytest.mark.parametrize(("words", "values"), OBSTACLES.items(), ids=list(OBSTACLES))
def test_what_cannot_be_captured_is_refused_and_auto_leaves_it_alone(words: str, values: dict[str, object]) -> None:
    reason = cuda_graph.unsupported_reason(changed(**values), "cuda")
    assert reason is not None
    assert words in reason
    assert reason.startswith("cuda_graph is step, but ")
    auto = changed(cuda_graph="auto", **values)
    assert cuda_graph.unsupported_reason(auto, "cuda") is None
    assert words in (cuda_graph.not_captured_reason(auto, "cuda") or "")


def test_a_step_of_one_gpu_is_captured_where_asked_and_by_auto_up_to_8192_tokens() -> None:
    assert cuda_graph.unsupported_reason(SETTINGS, "cuda") is None
    for tokens, captured in ((8192, True), (8193, False)):
        long = changed(seq_len=tokens)
        assert cuda_graph.not_captured_reason(long, "cuda") is None
        found = cuda_graph.not_captured_reason(dataclasses.replace(long, cuda_graph="auto"), "cuda")
        assert (found is None) == captured
    assert cuda_graph.not_captured_reason(changed(seq_len=2048, batch_size=5, cuda_graph="auto"), "cuda") is not None
    assert cuda_graph.not_captured_reason(changed(cuda_graph="none"), "cuda") == "cuda_graph is none"


def test_other_tasks_have_no_step_to_capture() -> None:
    assert cuda_graph.unsupported_reason(changed(task="attention"), "cpu") is None


def on_a_cpu(setting: str) -> str | dict[str, str]:
    settings = changed(seq_len=64, cuda_graph=setting)
    try:
        task = TrainTask(settings, METHOD, arrange(settings, torch.device("cpu")))
        return task.run(lambda step: None).chosen
    except ValueError as error:
        return str(error)


def test_without_a_gpu_a_captured_step_is_refused_and_the_record_says_what_auto_did() -> None:
    assert run_on_ranks(1, on_a_cpu, "step") == [
        "cuda_graph is step, but this machine has no GPU; set cuda_graph to none or auto"
    ]
    [chosen] = run_on_ranks(1, on_a_cpu, "auto")
    assert (chosen["cuda_graph"], chosen["cuda_graph_reason"]) == ("none", "this machine has no GPU")
    [chosen] = run_on_ranks(1, on_a_cpu, "none")
    assert chosen["cuda_graph"] == "none"
    assert "cuda_graph_reason" not in chosen


class SomeIgnored(Sequences):
    """The built-in text, of whose labels every second step ignores a part that other steps count."""

    def __init__(self) -> None:
        self._store = open_tokens("python_docs")

    def sequence(self, number: int, seq_len: int) -> Tensor:
        return self._store.sequence(number, seq_len)

    @property
    def vocabulary(self) -> int:
        return self._store.vocabulary

    def describe(self) -> dict[str, object]:
        return self._store.describe()

    def batch(self, step: int, replica: int, dp_size: int, batch_size: int, seq_len: int) -> tuple[Tensor, Tensor]:
        tokens, labels = super().batch(step, replica, dp_size, batch_size, seq_len)
        if step % 2:
            labels = labels.clone()
            labels[:, 100:] = IGNORE
        return tokens, labels


def steps_on_a_gpu(settings: TrialSettings) -> tuple[list[float], dict[str, list[float]], int]:
    """Loss and norm of every step, at a learning rate that changes; the parameters after them; and the peak bytes of a
    captured step."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True)
    task = TrainTask(settings, METHOD, arrange(settings, torch.device("cuda", 0)), sequences=SomeIgnored())
    figures = []
    for index in range(6):
        for group in task.optimizer.param_groups:
            group["lr"] = 1e-3 / (1 + index)
        done = task.step(index)
        assert 0 < done.forward_seconds < done.step_seconds
        figures += [done.loss, done.grad_norm]
    assert (task.captured_bytes > 0) == (settings.cuda_graph == "step")
    parameters = {name: parameter.flatten().tolist() for name, parameter in task.model.named_parameters()}
    return figures, parameters, task.captured_bytes


def needs_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    return pytest.mark.gpu(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")(test))


@needs_a_gpu
@pytest.mark.parametrize(
    "levers",
    [
        {"checkpoint": Checkpoint(every=0)},
        {"checkpoint": Checkpoint(every=1)},
        {"checkpoint": Checkpoint(every=2, tail=0.5, replay="bisect"), "mlp_tiles": 3, "projection_tiles": 2},
        {"checkpoint": Checkpoint(every=0), "gradient_accumulation": 2},
        {"lm_head_fusion": False},
        {"mask": "sliding_window:100"},
    ],
    ids=str,
)
def test_replayed_steps_equal_launched_ones_bit_for_bit(levers: dict[str, object]) -> None:
    settings = changed(deterministic=True, **levers)
    [launched] = run_on_ranks(1, steps_on_a_gpu, dataclasses.replace(settings, cuda_graph="none"), backend="nccl")
    [replayed] = run_on_ranks(1, steps_on_a_gpu, settings, backend="nccl")
    assert len(set(replayed[0])) == len(replayed[0])  # every step has its own tokens
    assert replayed[:2] == launched[:2]

"""A training step on any number of ranks beside the same step in one process: what parity tests compare."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from engine.data import open_tokens
from engine.data.sequences import PackedSequences, TokenSpan
from engine.distributed import World, arrange
from engine.lm_head.loss_kernel import IGNORE
from engine.optimizer import adamw, gradient_norm
from engine.settings import AdamWSettings, TrialSettings
from engine.tasks.check_training import dense_model, draw_second_adapters
from engine.tasks.train import TrainTask
from harness.spec.methods import method_named

Result = dict[str, Any]
SECOND_STD = 0.05  # of LoRA's second adapters, which are zero before a first step


def dense_run(
    settings: TrialSettings, dtype: torch.dtype = torch.float32, model: torch.nn.Module | None = None
) -> Result:
    """The same step in one process, by the trial's dense model or by `model`."""
    model = (dense_model(settings, torch.device("cpu")) if model is None else model).to(dtype)
    draw_second_adapters(model, settings.seed, SECOND_STD)
    loss = dense_step(model, settings, 1)
    gradients = {name: each.grad.double().numpy() for name, each in model.named_parameters() if each.requires_grad}
    norm = float(np.sqrt(sum((gradient**2).sum() for gradient in gradients.values())))
    return {"loss": loss.item(), "grad_norm": norm, "gradients": gradients}


def dense_step(model: torch.nn.Module, settings: TrialSettings, step: int) -> Tensor:
    """Form the gradients of a step on one model; returns its mean loss. Packed documents are sequences of their own."""
    texts = list(texts_of_step(settings, step))
    targets = sum(int((labels != IGNORE).sum()) for _, labels in texts)
    loss = torch.zeros((), dtype=torch.float64)
    if settings.packs:
        model.longest = settings.seq_len
    for tokens_BS, labels_BS in texts:
        part = model(tokens_BS, torch.arange(tokens_BS.shape[1]), labels_BS) / targets
        part.backward()
        loss += part.detach()
    return loss


def texts_of_step(settings: TrialSettings, step: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and labels, [B, S], that all replicas learn from in a step: its sequences, or each packed document."""
    rows = settings.batch_size * settings.gradient_accumulation * settings.dp_size
    store = open_tokens(settings.data)
    if not settings.packs:
        yield store.batch(step, 0, 1, rows, settings.seq_len)
        return
    packed = PackedSequences(store, TokenSpan(start=0, stop=store.header.count), settings)
    for number in range(step * rows, (step + 1) * rows):
        row = packed.row(packed.place(number))
        lengths = row.lengths.tolist()
        yield from zip(row.tokens_S[None].split(lengths, 1), row.labels_S[None].split(lengths, 1), strict=True)


def task_of(settings: TrialSettings) -> tuple[World, TrainTask]:
    """The training task of these ranks, on as many emulated nodes as the settings say, as a launcher names them."""
    node = torch.distributed.get_rank() * settings.emulate_nodes // settings.world_size
    os.environ["NCCL_HOSTID"] = f"node-{node}"
    world = arrange(settings, torch.device("cpu"))
    return world, TrainTask(settings, method_named(settings.method), world)


def parallel_runs(cases: dict[str, TrialSettings], steps: int = 0) -> dict[str, Result]:
    """Loss, norm and gathered gradients of each case on these ranks, and its parameters after `steps` optimizer steps;
    gradients and parameters from rank 0 alone."""
    results = {}
    for name, settings in cases.items():
        world, task = task_of(settings)
        draw_second_adapters(task.model, settings.seed, SECOND_STD)
        total = task.gradients(1)
        torch.distributed.all_reduce(total)
        gradients = {}
        for parameter_name, parameter in task.model.named_parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None, parameter_name
                continue
            gradients[parameter_name] = whole_of(parameter.grad).double().numpy()
        results[name] = {
            "loss": total.item(),
            "gradients": gradients if world.rank == 0 else {},
            "grad_norm": gradient_norm(task.model.parameters()).item(),
        }
        task.optimizer.zero_grad()
        for step in range(steps):
            task.step(step, with_update=step == steps - 1)
        whole = {key: whole_of(parameter).detach().double().numpy() for key, parameter in task.model.named_parameters()}
        results[name]["parameters"] = whole if steps and world.rank == 0 else {}
    return results


def whole_of(tensor: Tensor) -> Tensor:
    """The tensor that a DTensor holds shards of; any other as it is: one rank alone keeps its parameters whole."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def dense_parameters(settings: TrialSettings, steps: int) -> dict[str, Any]:
    """Every parameter after some optimizer steps in one process, on whole batches."""
    model = dense_model(settings, torch.device("cpu")).double()
    draw_second_adapters(model, settings.seed, SECOND_STD)
    optimizer = adamw(model, settings.learning_rate, AdamWSettings())
    for step in range(steps):
        dense_step(model, settings, step)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


def errors(found: Result, truth: Result) -> dict[str, float]:
    """Relative error of loss, norm and each gradient."""
    compared = {name: abs(found[name] / truth[name] - 1) for name in ("loss", "grad_norm")}
    for name, expected in truth["gradients"].items():
        compared[name] = apart(found["gradients"][name], expected)
    return compared


def apart(found: Any, expected: Any) -> float:
    """Norm of the difference over that of what is expected."""
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))

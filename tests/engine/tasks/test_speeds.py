"""Speeds measured beside a trial's steps: its own matrix products, and the link between nodes."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine.attention.comm.communicators import Communicators
from engine.attention.context import ContextParallel
from engine.distributed import World, arrange
from engine.measurement import Measurement, relative_error
from engine.models.decoder import Decoder
from engine.ops.float8 import Float8Products
from engine.ops.products import PLAIN, Products
from engine.settings import Steps, TrialSettings
from engine.shape import ModelShape
from engine.tasks import speeds as speeds_of_trial
from engine.tasks.products import DIRECTIONS, MatrixProduct, matrix_products
from engine.tasks.speeds import IN_THIS_TRIAL, MOMENTS, LinkProbes, gemm_figures, measure_products, rows_of
from tests.ranks import run_on_ranks

SHAPE = ModelShape(name="small", layers=2, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, gated=False, kv_heads=4, head_dim=16, qk_norm=True)])
def test_the_products_are_the_weights_of_the_model(shape) -> None:
    weights = [parameter for parameter in Decoder(shape).parameters() if parameter.dim() == 2]
    found = sorted(tuple(weight.shape) for weight in weights)
    found.remove((shape.vocab, shape.hidden))  # the embedding, which is no product
    named = [(each.outputs, each.inputs) for each in matrix_products(shape) for _ in range(each.count)]
    assert sorted(named) == found


def test_every_product_is_measured_in_every_direction() -> None:
    products = matrix_products(SHAPE)
    speeds = measure_products(CPU, products, {each.name: 8 for each in products}, torch.bfloat16)
    assert set(speeds) == {"query", "key_value", "out", "gate_up", "down", "lm_head"}
    for each in speeds.values():
        assert tuple(each) == DIRECTIONS
        assert min(each.values()) > 0


@pytest.mark.parametrize(
    ("products", "dtype", "allowed"), [(PLAIN, torch.float64, 1e-14), (Float8Products(), torch.bfloat16, 0.09)]
)
def test_the_measured_calls_are_the_product_and_its_two_gradients(
    products: Products, dtype: torch.dtype, allowed: float
) -> None:
    rows, inputs, outputs = 5, 16, 32
    forward, dgrad, wgrad = (call() for call in speeds_of_trial._calls(CPU, rows, inputs, outputs, dtype, products))
    generator = torch.Generator().manual_seed(0)
    x, dy, w = (
        torch.empty(shape, dtype=dtype).normal_(generator=generator).double().requires_grad_()
        for shape in ((rows, inputs), (rows, outputs), (outputs, inputs))
    )
    y = torch.nn.functional.linear(x, w)
    for found, truth in zip((forward, dgrad, wgrad), (y, *torch.autograd.grad(y, (x, w), dy)), strict=True):
        assert relative_error(found, truth.detach()) <= allowed


def test_products_of_layers_alone_are_measured_in_float8() -> None:
    shape = replace(SHAPE, layer_pattern="lf", linear="mamba2", linear_heads=4, linear_key_heads=2, linear_key_dim=16,
                    linear_value_dim=16)  # fmt: skip
    products = matrix_products(shape)
    float8 = {each.name for each in products if each.float8}
    assert float8 == {"query", "key_value", "out", "gate_up", "down"}
    assert sum(each.weights for each in products if each.float8) == shape.layers * shape.float8_matrices
    with mock.patch.object(speeds_of_trial, "_calls", wraps=speeds_of_trial._calls) as calls:
        measure_products(CPU, products, {each.name: 16 for each in products}, torch.bfloat16, Float8Products())
    assert {call.args[-1] is PLAIN for call in calls.call_args_list} == {True, False}


def test_products_of_one_shape_are_measured_once() -> None:
    square = tuple(MatrixProduct(name=name, inputs=16, outputs=16, count=1) for name in ("query", "out"))
    with mock.patch.object(speeds_of_trial, "_calls", wraps=speeds_of_trial._calls) as calls:
        speeds = measure_products(CPU, square, {"query": 4, "out": 4}, torch.bfloat16)
    assert calls.call_count == 1
    assert speeds["query"] == speeds["out"]


@pytest.mark.parametrize(
    ("tokens", "outputs", "rows"),
    [(64, 4096, 64), (1000, 4096, 896), (1 << 20, 4096, 16384), (1 << 20, 128256, 4096), (1 << 20, 1 << 30, 128)],
)
def test_rows_are_the_ranks_tokens_up_to_what_a_gemm_needs(tokens, outputs, rows) -> None:
    assert rows_of(MatrixProduct(name="down", inputs=64, outputs=outputs, count=1), tokens, 2) == rows


def settings_of(**changes: object) -> TrialSettings:
    return TrialSettings(task="train", method="burst", model=SHAPE, seq_len=64, dtype="bf16", cp_size=2, **changes)


def on_this_rank(case: str) -> dict:
    """What a trial on GPUs would record, with the CPU in the GPU's place."""
    world = arrange(settings_of(), CPU)
    failing = RuntimeError("CUDA out of memory. Tried to allocate 4 GiB\nmore lines")
    if case == "cpu":
        return gemm_figures(world, settings_of())
    if case == "fp32":
        return gemm_figures(_on_gpu(world), replace(settings_of(), dtype="fp32"))
    if case == "oom" and dist.get_rank() == 1:
        with mock.patch.object(speeds_of_trial, "measure_products", side_effect=failing):
            return gemm_figures(_on_gpu(world), settings_of())
    measure = speeds_of_trial.measure_products
    with mock.patch.object(speeds_of_trial, "measure_products", lambda _device, *rest: measure(CPU, *rest)):
        return gemm_figures(_on_gpu(world), settings_of())


def _on_gpu(world: World) -> World:
    return replace(world, device=torch.device("cuda", 0))


def test_ranks_record_one_figure_of_each_product() -> None:
    one, other = run_on_ranks(2, on_this_rank, "ok")
    assert one == other
    assert one["gemm"]["shapes"]["key_value"] == [32, 32, 16]  # tokens of the rank, inputs, outputs
    assert one["gemm"]["where"] == IN_THIS_TRIAL
    assert all(min(speeds.values()) > 0 for speeds in one["gemm_tflops"].values())


def test_a_rank_without_memory_for_it_costs_the_figure_and_not_the_trial() -> None:
    for found in run_on_ranks(2, on_this_rank, "oom"):
        assert "gemm_tflops" not in found
        assert found["gemm"]["reason"] == (
            "the GEMMs of this trial's shapes were not measured: rank 1: CUDA out of memory. Tried to allocate 4 GiB"
        )


@pytest.mark.parametrize("case", ["cpu", "fp32"])
def test_nothing_is_recorded_where_no_ceiling_can_be_formed(case) -> None:
    assert run_on_ranks(2, on_this_rank, case) == [{}, {}]


LINK_SHAPE = ModelShape(name="small", layers=1, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=8, vocab=256)


def link_settings(task: str, steps: Steps) -> TrialSettings:
    return TrialSettings(
        task=task, method="burst", model=LINK_SHAPE, seq_len=64, cp_size=2, dtype="fp32", emulate_nodes=2, steps=steps
    )


def measured_on_two_nodes(task: str, steps: Steps, same_host: bool) -> tuple[Measurement, list[str]]:
    """(measurement, order of steps and measurements of the link) of this rank's trial."""
    from engine.burst import METHOD
    from engine.worker import TASKS

    if not same_host:
        os.environ["NCCL_HOSTID"] = f"node{dist.get_rank()}"
    settings, events = link_settings(task, steps), []
    world = arrange(settings, torch.device("cpu"))
    measure = Communicators.measure_link

    def watched(self: Communicators, message: torch.Tensor, *, spread: bool) -> float | None:
        events.append("link to all peers" if spread else "link")
        return measure(self, message, spread=spread)

    with mock.patch.object(Communicators, "measure_link", watched):
        measurement = TASKS[task](settings, METHOD, world).run(lambda step: events.append(f"step {step['step']}"))
    return measurement, events


@pytest.mark.parametrize("task", ["attention", "train"])
def test_the_link_is_measured_before_between_and_after_the_measured_steps(task) -> None:
    ranks = run_on_ranks(2, measured_on_two_nodes, task, Steps(warmup=1, measured=3), False)
    for measurement, events in ranks:
        # The last two are of the speed and of the latency.
        assert events == ["link", "step 1", "step 2", "link", "step 3", "step 4", "link", "link"]
        speeds = measurement.extra["link_gib_per_second"]
        assert tuple(speeds) == MOMENTS
        assert min(speeds.values()) > 0
        assert measurement.extra["across_gib_per_second"] == speeds["after"]
        assert 0 < measurement.extra["link_latency_seconds"] < 1
    assert ranks[0][0].extra["link_gib_per_second"] == ranks[1][0].extra["link_gib_per_second"]


def test_with_one_measured_step_the_link_is_measured_after_the_warm_up() -> None:
    ((_, events), _) = run_on_ranks(2, measured_on_two_nodes, "attention", Steps(warmup=1, measured=1), False)
    assert events == ["link", "step 1", "link", "step 2", "link", "link"]


def test_the_bytes_between_nodes_are_recorded_beside_all_bytes() -> None:
    for measurement, _ in run_on_ranks(2, measured_on_two_nodes, "attention", Steps(warmup=0, measured=1), False):
        extra = measurement.extra
        assert extra["computed_sent_between_nodes_bytes"] == extra["computed_sent_bytes"] == measurement.sent_bytes
        assert min(measurement.sent_bytes) > 0


def test_ranks_of_one_node_measure_no_link() -> None:
    for measurement, events in run_on_ranks(2, measured_on_two_nodes, "train", Steps(warmup=1, measured=2), True):
        assert events == ["step 1", "step 2", "step 3"]
        assert not {"link_gib_per_second", "across_gib_per_second", "link_latency_seconds"} & measurement.extra.keys()


def sizes_of_messages(message_bytes: int) -> list[Any]:
    """Bytes of every message that probes of that size measure with."""
    world = arrange(link_settings("train", Steps()), torch.device("cpu"))
    probes = LinkProbes(world, ContextParallel(node_size=1), Steps(warmup=1, measured=2), message_bytes=message_bytes)
    sizes = []

    def sized(message: torch.Tensor, *, spread: bool) -> float:
        sizes.append(message.nbytes)
        return 2.0

    with mock.patch.object(probes._cp.comms, "measure_link", sized):
        probes.before_step(0)
    return sizes


def fastest_patterns() -> tuple[list[bool], dict[str, Any]]:
    """(patterns in the order they were measured, figures) of four ranks on two nodes, where the first measurement of a
    pattern finds 1 GiB/s, or 2 to all peers, and each later one a tenth more."""
    settings = replace(link_settings("train", Steps()), cp_size=4, world_size=4)
    world, asked = arrange(settings, torch.device("cpu")), []

    def found(message: torch.Tensor, *, spread: bool) -> float:
        asked.append(spread)
        return (2.0 if spread else 1.0) + 0.1 * (asked.count(spread) - 1)

    probes = LinkProbes(world, ContextParallel(node_size=2), Steps(warmup=1, measured=2), message_bytes=64)
    with mock.patch.object(probes._cp.comms, "measure_link", found):
        for step in range(3):
            probes.before_step(step)
        return asked, probes.figures()


def test_the_faster_of_both_patterns_is_the_link() -> None:
    for asked, figures in run_on_ranks(4, fastest_patterns):
        assert asked == [False, True] * 3 + [False]  # the last: the latency
        assert figures["link_gib_per_second"] == pytest.approx({"before": 2.0, "between": 2.1, "after": 2.2})
        assert figures["link_by_pattern"] == pytest.approx({"one_peer": 1.2, "all_peers": 2.2})


def test_a_message_is_no_larger_than_queries_and_than_a_link_needs() -> None:
    [large, _] = run_on_ranks(2, sizes_of_messages, 1 << 40)
    [small, _] = run_on_ranks(2, sizes_of_messages, 4096)
    assert (large, small) == ([64 << 20], [4096])

"""The speed of a model's own matrix products: which they are, how they are measured, and what a record gets of it."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from engine.distributed import World, arrange
from engine.model import Decoder
from engine.settings import ModelShape, TrialSettings
from engine.tasks import speeds as speeds_of_trial
from engine.tasks.products import DIRECTIONS, MatrixProduct, matrix_products
from engine.tasks.speeds import EARLIER, IN_THIS_TRIAL, gemm_figures, measure_products, rows_of
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


def test_the_measured_calls_are_the_product_and_its_two_gradients() -> None:
    rows, inputs, outputs = 5, 7, 11
    forward, dgrad, wgrad = (call() for call in speeds_of_trial._calls(CPU, rows, inputs, outputs, torch.float64))
    generator = torch.Generator().manual_seed(0)
    x, dy, w = (
        torch.empty(shape, dtype=torch.float64).normal_(generator=generator).requires_grad_()
        for shape in ((rows, inputs), (rows, outputs), (outputs, inputs))
    )
    y = torch.nn.functional.linear(x, w)
    torch.testing.assert_close(forward, y)
    for found, truth in zip((dgrad, wgrad), torch.autograd.grad(y, (x, w), dy), strict=True):
        torch.testing.assert_close(found, truth)


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


def on_this_rank(case: str) -> list[dict]:
    """What a trial on GPUs would record, twice in one process, with the CPU in the GPU's place."""
    world = arrange(settings_of(), CPU)
    failing = RuntimeError("CUDA out of memory. Tried to allocate 4 GiB\nmore lines")
    if case == "cpu":
        return [gemm_figures(world, settings_of())]
    if case == "fp32":
        return [gemm_figures(_on_gpu(world), replace(settings_of(), dtype="fp32"))]
    if case == "oom" and dist.get_rank() == 1:
        with mock.patch.object(speeds_of_trial, "measure_products", side_effect=failing):
            return [gemm_figures(_on_gpu(world), settings_of())]
    measure = speeds_of_trial.measure_products
    with mock.patch.object(speeds_of_trial, "measure_products", lambda _device, *rest: measure(CPU, *rest)):
        times = 1 if case == "oom" else 2
        return [gemm_figures(_on_gpu(world), settings_of()) for _ in range(times)]


def _on_gpu(world: World) -> World:
    return replace(world, device=torch.device("cuda", 0))


def test_ranks_record_one_figure_of_each_product_and_measure_a_shape_once_in_a_process() -> None:
    one, other = run_on_ranks(2, on_this_rank, "ok")
    assert one == other
    first, second = one
    assert first["gemm"]["shapes"]["key_value"] == [32, 32, 16]  # tokens of the rank, inputs, outputs
    assert (first["gemm"]["where"], second["gemm"]["where"]) == (IN_THIS_TRIAL, EARLIER)
    assert first["gemm"]["started_at"] == second["gemm"]["started_at"]
    assert first["gemm_tflops"] == second["gemm_tflops"]
    assert all(min(speeds.values()) > 0 for speeds in first["gemm_tflops"].values())


def test_a_rank_without_memory_for_it_costs_the_figure_and_not_the_trial() -> None:
    for [found] in run_on_ranks(2, on_this_rank, "oom"):
        assert "gemm_tflops" not in found
        assert found["gemm"]["reason"] == (
            "the GEMMs of this trial's shapes were not measured: rank 1: CUDA out of memory. Tried to allocate 4 GiB"
        )


@pytest.mark.parametrize("case", ["cpu", "fp32"])
def test_nothing_is_recorded_where_no_ceiling_can_be_formed(case) -> None:
    assert run_on_ranks(2, on_this_rank, case) == [[{}], [{}]]

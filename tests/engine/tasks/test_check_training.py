"""The check of training trials: exact methods pass it, wrong ones do not, and it leaves nothing behind."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from engine import parallelize
from engine.attention.masks import parse_mask
from engine.distributed import arrange
from engine.lora import Lora, Target
from engine.measurement import UNCHECKED
from engine.method import method_unsupported_reason
from engine.ops.float8 import Float8Products
from engine.ops.products import Operand
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from engine.tasks.check_training import DINPUT, HIDDEN, LOSS, check_problem, check_training
from harness.records.judging import rounding_of, training_fault
from harness.spec.methods import method_named
from tests.engine.tasks import wrong_methods
from tests.ranks import run_on_ranks
from tests.slow import slow

TINY = ModelShape(name="tiny", layers=2, hidden=64, ffn=96, heads=8, kv_heads=4, head_dim=16, vocab=256)
DEEP = dataclasses.replace(TINY, name="deep", layers=32, hidden=4096, ffn=14336, vocab=128256, qk_norm=True)
TARGETS: tuple[Target, ...] = ("q", "k", "v", "output", "gate", "up", "down")
LONG = TrialSettings(task="train", method="burst", model=TINY, seq_len=1 << 20, dtype="fp32")


def of(**changes: Any) -> TrialSettings:
    return dataclasses.replace(LONG, **{"world_size": 0, **changes})


FLOAT8: dict[str, Any] = {"dtype": "bf16", "linear_dtype": "float8"}

# Ranks, and trials of a million tokens, between them every native method and every lever that a step has. The last ones
# of four ranks repeat a method, and are slow.
EXACT = {
    1: [
        of(model=DEEP, dtype="bf16", lm_head_fusion=False, z_loss=0.01),
        of(model=DEEP, optimizer_offload=True, gradient_accumulation=16, checkpoint=Checkpoint(every=4)),
        of(dtype="bf16", mask="documents:7,17,5,..."),
        of(dtype="fp64", mlp_tiles=64, projection_tiles=8, head_tiles=16, batch_size=4),
        of(method="torch_cp"),
        *(of(model=DEEP, dtype="bf16", lora=Lora(rank=rank, alpha=2 * rank, targets=TARGETS)) for rank in (1, 64)),
        # Every query sees one key, so dq and dk are 0 but for rounding, which has no error relative to them.
        of(mask="sliding_window:0"),
        of(mask="sliding_window:0", dtype="bf16"),
        of(model=DEEP, **FLOAT8, checkpoint=Checkpoint(every=1, whole_layers=30, mlp=0.3)),
        of(**FLOAT8, mlp_tiles=64, projection_tiles=8, optimizer_offload=True, gradient_accumulation=2),
    ],
    2: [
        of(cp_size=2, model=DEEP, dtype="bf16", checkpoint=Checkpoint(every=1, tail=0.4), mlp_tiles=8),
        of(cp_size=2, model=DEEP, checkpoint=Checkpoint(every=8, tail=0, offload="inputs", replay="bisect")),
        of(cp_size=2, model=DEEP, checkpoint=Checkpoint(every=1, whole_layers=30, mlp=0.3, offload="all")),
        of(cp_size=2, mask="full", gradient_accumulation=3, dtype="bf16"),
        of(cp_size=1, world_size=2, batch_size=3, sharding="hybrid", emulate_nodes=2),
        of(method="megatron_tp", cp_size=1, tp_size=2, model=DEEP, checkpoint=Checkpoint(tail=0.5)),
        of(method="megatron_tp", cp_size=1, tp_size=2, dtype="bf16", lm_head_fusion=False),
        of(method="torch_cp", cp_size=2, dtype="bf16"),
        of(cp_size=2, model=DEEP, **FLOAT8, checkpoint=Checkpoint(every=2, tail=0.4), mlp_tiles=8),
        of(cp_size=2, mask="documents", batch_size=2, gradient_accumulation=2, checkpoint=Checkpoint(tail=0.5)),
    ],
    4: [
        of(cp_size=2, world_size=4, mask="documents", dtype="bf16"),
        of(cp_size=4, schedule="usp", emulate_nodes=2, mask="documents:300k,200k,12k,...:full"),
        of(cp_size=4, layout="striped", backward="key_value", mask="sliding_window:64k:32k:16"),
        of(cp_size=2, world_size=4, gradient_accumulation=2),
        of(method="ring", cp_size=4),
        of(method="megatron_cp", cp_size=4, dtype="bf16"),
        of(method="ulysses", cp_size=4, model=dataclasses.replace(TINY, kv_heads=2), dtype="bf16"),
        of(method="loongtrain_double_ring", cp_size=4, emulate_nodes=2, dtype="bf16"),
        of(method="loongtrain_usp", cp_size=4, emulate_nodes=2),
        of(method="megatron_tp", cp_size=1, tp_size=4, mask="documents:1k,5k,..."),
        of(cp_size=4, schedule="double_ring", emulate_nodes=2, backward="query", checkpoint=Checkpoint(tail=0)),
        of(cp_size=4, schedule="all_gather", dtype="bf16", mask="sliding_window:8191"),
        of(cp_size=4, schedule="ulysses", layout="contiguous", mask="block_sparse:1k:strided-128:causal"),
        of(cp_size=4, schedule="usp", emulate_nodes=2, model=DEEP),
        of(cp_size=4, schedule="usp_transposed", emulate_nodes=2, dtype="bf16"),
        of(cp_size=4, layout="split_zigzag", checkpoint=Checkpoint(tail=0.3), dtype="bf16"),
        of(method="megatron_cp", cp_size=4, dtype="bf16", model=DEEP),
        of(method="ulysses", cp_size=4, model=DEEP, checkpoint=Checkpoint(every=0)),
        of(method="loongtrain_usp", cp_size=4, emulate_nodes=2, schedule="usp_transposed"),
        of(method="megatron_tp", cp_size=1, tp_size=2, world_size=4),
        of(method="torch_cp", cp_size=4),
    ],
}


def checks(cases: list[TrialSettings], wrong: bool = False) -> list[dict[str, Any]]:
    found = []
    for settings in cases:
        rank, size = torch.distributed.get_rank(), settings.world_size
        os.environ["NCCL_HOSTID"] = f"node-{rank * settings.emulate_nodes // size}"
        method = wrong_methods.METHOD if wrong else method_named(settings.method)
        assert method.refuse(settings) is None
        found.append(check_training(settings, method, arrange(settings, torch.device("cpu")), {}))
    return found


def fault(settings: TrialSettings, found: dict[str, Any]) -> str:
    assert UNCHECKED not in found, found
    return training_fault(
        settings.method, rounding_of(settings), "cpu", found["error"], found["error_at"], found["error_scale"]
    )


@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(1, EXACT[1]), (2, EXACT[2]), (4, EXACT[4][:10]), *slow((4, EXACT[4][10:]))],
    ids=["1", "2", "4", "4, repeated"],
)
def test_every_native_method_takes_the_step_of_a_dense_run(ranks: int, cases: list[TrialSettings]) -> None:
    per_rank = run_on_ranks(ranks, checks, cases)
    assert all(found == per_rank[0] for found in per_rank)
    for settings, found in zip(cases, per_rank[0], strict=True):
        assert fault(settings, found) == "", settings
        layers = min(settings.model.layers, 3)
        of_a_layer = 11 if settings.model.qk_norm else 9
        gradients = 3 + layers * of_a_layer if settings.lora is None else layers * 2 * len(TARGETS)
        assert len(found["error"]) == 3 + gradients  # loss, hidden, dinput; of a whole model embedding, last norm, head
        assert min(error for name, error in found["error"].items() if name != "loss") > 0
        assert found["checked"]["tokens"] < 1024
        tokens = found["checked"]["tokens"] * (settings.batch_size if settings.packs else 1)  # packed rows are joined
        assert found["error_at"].keys() == found["error"].keys() - {LOSS}
        for at in (found["error_at"][name] for name in (HIDDEN, DINPUT)):
            assert 0 <= at["first_token"] <= at["last_token"] < tokens
            assert 0 <= at["rank"] < ranks


CHECKPOINTS = [
    Checkpoint(every=0),
    Checkpoint(every=1, tail=1),
    Checkpoint(every=1, tail=0),
    Checkpoint(every=1, tail=0.5, offload="all"),
    Checkpoint(every=2, tail=0.5, replay="bisect"),
]


# By kind, what the verdict names.
WRONG = {
    wrong_methods.TILE_DROPPED: ("the final hidden state is off by", r", most on rank \d, tokens (19[2-9]|2..) to 2.."),
    wrong_methods.DK_TIMES_1_02: (
        r"attention\.k\.weight is 1\.0[12]\d* times the true one",
        r"times the true one \(allowed 1 within [\d.e-]+\), most in row \d+",
    ),
    wrong_methods.POSITIONS_OFF_BY_ONE: ("the final hidden state is off by", ", most on rank 1, tokens"),
    wrong_methods.NOT_A_NUMBER: ("holds NaN or infinity",),
    wrong_methods.DK_LOST: (r"attention\.k\.weight is 0 times the true one",),
    wrong_methods.DK_OF_LAST_HEAD: (r"attention\.k\.weight is .*, most in row (4[89]|5\d|6[0-3])\b",),  # of 64
}


@pytest.mark.parametrize(
    "cases",
    [
        [
            (kind, ("fp32", "bf16")[at % 2], CHECKPOINTS[(at + add) % 5])
            for at, kind in enumerate(WRONG)
            for add in (0, 2)
        ],
        *slow([*itertools.product(WRONG, ("fp32", "bf16"), CHECKPOINTS)]),
    ],
    ids=len,
)
def test_a_method_that_computes_something_else_is_found(cases: list[tuple[int, Any, Checkpoint]]) -> None:
    trials = [of(cp_size=2, seed=kind, dtype=dtype, checkpoint=each, schedule="ring") for kind, dtype, each in cases]
    for settings, found in zip(trials, run_on_ranks(2, checks, trials, True)[0], strict=True):
        says = fault(settings, found)
        assert says.startswith("burst with kernel cpu computes something else than a dense float64 step"), settings
        for words in WRONG[settings.seed]:
            assert re.search(words, says), says


class Faulty(Float8Products):
    """Products in float8 of which one is wrong, as the seed of the trial says."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind

    def operand(self, matrix_RC: Tensor, *, gradient: bool = False, **asked: Any) -> Operand:
        found = super().operand(matrix_RC, gradient=gradient, **asked)
        if self.kind == 1 and gradient:  # a unit that is off
            return dataclasses.replace(found, unit=1.06 * found.unit)
        if self.kind == 2:  # tokens and inputs beyond the first 16, as by a kernel that transposes wrongly
            return dataclasses.replace(found, columns_CR=found.columns_CR.roll(16, 0))
        return found

    def weight_gradient(self, dout: Operand, x: Operand, dtype: torch.dtype) -> Tensor:
        found = super().weight_gradient(dout, x, dtype)
        return found * (self.kind != 3)

    def input_gradient(self, dout: Operand, matrix: Operand, dx_TI: Tensor | None = None) -> Tensor:
        return super().input_gradient(dout, matrix, None if self.kind == 4 else dx_TI)  # of up, not of gate


def faulty(cases: list[TrialSettings]) -> list[dict[str, Any]]:
    kinds = iter(cases)
    parallelize.Float8Products = lambda: Faulty(next(kinds).seed)  # type: ignore[assignment, misc]
    return checks(cases)


def test_a_wrong_product_in_float8_is_found() -> None:
    trials = [of(model=DEEP, **FLOAT8, seed=kind, mlp_tiles=2) for kind in range(5)]
    says = [fault(*pair) for pair in zip(trials, run_on_ranks(1, faulty, trials)[0], strict=True)]
    assert says[0] == ""
    assert all("beyond the rounding of float8" in each for each in says[1:])


def left_behind(settings: TrialSettings) -> list[str]:
    """What changed from one check to the next."""
    world = arrange(settings, torch.device("cpu"))
    method = method_named(settings.method)
    first = check_training(settings, method, world, {})  # fills what is kept for good
    state, before = torch.get_rng_state(), live_tensors()
    problems = [] if check_training(settings, method, world, {}) == first else ["another result"]
    if live_tensors() != before:
        problems.append("tensors stay")
    if not torch.equal(state, torch.get_rng_state()):
        problems.append("random state")
    return problems


def live_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())


def test_a_check_leaves_nothing_behind() -> None:
    settings = of(cp_size=2, checkpoint=Checkpoint(every=2, offload="inputs"))
    assert run_on_ranks(2, left_behind, settings) == [[], []]


def test_a_refused_check_says_why() -> None:
    settings = of(cp_size=2, seed=wrong_methods.CHECK_REFUSED)
    assert run_on_ranks(2, checks, [settings], True) == [[{UNCHECKED: "refused as planned"}]] * 2


MASKS = {  # of a million tokens, and of a check problem of 256 of them
    "causal": "causal",
    "full": "full",
    "sliding_window:256k:4k": "sliding_window:64:8",
    "sliding_window:5:0:512k": "sliding_window:5:0:128",
    "documents:7,17,5,...": "documents:7,8,5,...",
    "documents:256k,768k:full": "documents:64,192:full",
    "documents:1k,1M,...": "documents:8,256,...",
    "block_sparse:128k:11111111/01111111/00111111/00011111/00001111/00000111/00000011/00000001": (
        "block_sparse:32:11111111/01111111/00111111/00011111/00001111/00000111/00000011/00000001"
    ),
    "block_sparse:1k:strided-128:causal": "block_sparse:8:strided-4:causal",
    "block_sparse:64k:local_global-2-1:causal": "block_sparse:16:local_global-2-1:causal",
}


@pytest.mark.parametrize(("mask", "scaled"), MASKS.items())
def test_a_mask_is_scaled_to_one_of_its_kind(mask: str, scaled: str) -> None:
    problem = check_problem(of(mask=mask, cp_size=2), method_named("burst"), {})
    assert (str(problem.mask), problem.seq_len) == (str(parse_mask(scaled)), 256)


def test_a_check_of_windows_in_turn_has_layers_of_both_kinds() -> None:
    model = dataclasses.replace(TINY, layers=12, window=4096, layer_pattern="wwwwwf")
    problem = check_problem(of(model=model, cp_size=2), method_named("burst"), {})
    assert set(problem.model.windowed) == {True, False}
    assert problem.mask == "causal"


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 48, 64])
@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
def test_a_check_problem_is_one_that_mask_and_layout_take(ranks: int, layout: Any) -> None:
    grid = "/".join("1" * (row + 1) + "0" * (99 - row) for row in range(100))
    for mask in (*MASKS, f"block_sparse:10486:{grid}", "documents:" + ",".join(["1k"] * 1024)):
        settings = of(mask=mask, cp_size=ranks, layout=layout, seq_len=ranks * 1048576)
        if parse_mask(mask).unsupported_reason(settings.seq_len):
            settings = dataclasses.replace(settings, seq_len=1 << 20)
        problem = check_problem(settings, method_named("burst"), {})
        assert method_named("burst").refuse(problem) is None
        assert 256 <= problem.seq_len <= 1100


@pytest.mark.parametrize(
    ("heads", "kv_heads", "changes", "expected"),
    [
        (32, 8, {}, (8, 2)),
        (32, 8, {"cp_size": 4}, (16, 4)),
        (32, 8, {"cp_size": 3}, (8, 2)),
        (40, 40, {"cp_size": 4}, (4, 4)),
        (40, 40, {"cp_size": 16}, (8, 8)),  # no number of heads that 16 ranks divide, as in the model
        (64, 8, {"cp_size": 16}, (64, 8)),
        (32, 8, {"tp_size": 8, "method": "megatron_tp"}, (32, 8)),
        (8, 1, {"cp_size": 2}, (8, 1)),
    ],
)
def test_heads_are_as_few_as_ranks_divide_as_those_of_the_model(
    heads: int, kv_heads: int, changes: dict[str, Any], expected: tuple[int, int]
) -> None:
    settings = of(model=dataclasses.replace(DEEP, heads=heads, kv_heads=kv_heads), **changes)
    problem = check_problem(settings, method_named(settings.method), {})
    assert (problem.model.heads, problem.model.kv_heads) == expected
    assert problem.model.head_dim == DEEP.head_dim
    assert problem.model.qk_norm
    assert problem.model.parameters < 5e6


@pytest.mark.parametrize(
    ("checkpoint", "expected"),
    [
        (Checkpoint(every=1, tail=0.3, offload="all"), Checkpoint(every=1, tail=0.3, offload="all")),
        (Checkpoint(every=8, replay="bisect"), Checkpoint(every=2, replay="bisect")),
        (Checkpoint(every=1, whole_layers=30), Checkpoint(every=1, whole_layers=1)),
        (Checkpoint(every=1, whole_layers=32), Checkpoint(every=1, whole_layers=3)),
        (Checkpoint(every=0, mlp=0.3), Checkpoint(every=0, mlp=0.3)),
        (Checkpoint(every=0, host_layers=8), Checkpoint(every=0, host_layers=2)),
        (Checkpoint(every=1, whole_layers=16, host_layers=4), Checkpoint(every=1, whole_layers=2, host_layers=1)),
    ],
)
def test_what_is_computed_again_is_so_in_the_check(checkpoint: Checkpoint, expected: Checkpoint) -> None:
    problem = check_problem(of(model=DEEP, checkpoint=checkpoint), method_named("burst"), {})
    assert (problem.checkpoint, problem.model.layers) == (expected, 3)
    again = checkpoint.layers_again(32) > 0, checkpoint.reuses_attention(32)
    assert (problem.checkpoint.layers_again(3) > 0, problem.checkpoint.reuses_attention(3)) == again


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer_states": "8bit"},
        {"checkpoint": Checkpoint(every=0, host_layers=31)},
        {"checkpoint": Checkpoint(every=1, whole_layers=30, host_layers=20)},
        {"head_groups": 8, "model": dataclasses.replace(DEEP, heads=32, kv_heads=8)},
        {"mask": "documents", "packing": "greedy", "model": dataclasses.replace(DEEP, window=4096)},
    ],
)
def test_what_a_smaller_model_cannot_have_does_not_keep_a_step_from_its_check(changes: dict[str, Any]) -> None:
    trial = of(**{"model": DEEP, **changes})
    assert method_unsupported_reason(method_named("burst"), trial) is None
    problem = check_problem(trial, method_named("burst"), {})
    assert method_unsupported_reason(method_named("burst"), problem) is None


def test_what_auto_became_is_checked_and_a_small_trial_keeps_its_shape_and_length() -> None:
    resolved = {
        "layout": "contiguous", "schedule": "ulysses", "backward": "key_value", "exchange": "all_to_all",
        "kernel": "flash", "estimate": "ulysses 198 ms",
    }  # fmt: skip
    problem = check_problem(of(cp_size=4), method_named("burst"), resolved)
    chosen = (problem.layout, problem.schedule, problem.backward, problem.exchange, problem.kernel)
    assert chosen == ("contiguous", "ulysses", "key_value", "auto", "auto")  # the last two are no values of a setting
    assert check_problem(of(method="ring", cp_size=4), method_named("ring"), resolved).schedule == "auto"
    small = of(seq_len=192, cp_size=4, mask="sliding_window:100:3", checkpoint=Checkpoint(every=2, whole_layers=1))
    problem = check_problem(small, method_named("burst"), {})
    model = dataclasses.replace(problem.model, name=small.model.name)
    assert (model, problem.seq_len, problem.mask, problem.checkpoint) == (TINY, 192, small.mask, small.checkpoint)

"""Under `torch.compile` attention is one operation: no graph breaks, and results and gradients are those of eager
calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention import compiled
from engine.attention.algorithms.saved import SavedOutput, save_suffix
from engine.attention.context import PlanCache, context_named
from engine.attention.geometry.balanced import Balanced
from engine.attention.masks import BlockSparse, Causal, Documents, Full, Mask, SlidingWindow, Strided
from engine.attention.prepared import constant_in_programs
from tests.ranks import run_on_ranks
from tests.slow import slow

TOKENS = 32
MASKS: tuple[Mask | None, ...] = (
    None,
    Causal(),
    SlidingWindow(5, 2, 3),
    Documents((9, 23)),
    BlockSparse(Strided(2), 8, causal=True),
)


def test_functions_are_marked_as_torch_marks_them() -> None:
    def ours() -> None: ...
    def theirs() -> None: ...

    assert vars(constant_in_programs(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


def leaves(cp: ContextParallel, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(2, TOKENS, heads, 8, generator=generator) for heads in (4, 2, 2)]
    return [cp.shard(t).clone().requires_grad_() for t in whole]


def results(model: Any, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    out = model(*inputs)
    return [out.detach(), *torch.autograd.grad(out.square().sum(), inputs)]


def compiled_and_eager(world: str, backend: str, masks: tuple[Mask | None, ...]) -> list[str]:
    """Cases in which a compiled program differs from the eager one in some bit."""
    cp = ContextParallel.single() if world == "one" else ContextParallel()
    wrong = []
    for mask in masks:
        attend = prepare_attention(*leaves(cp)[:2], mask=mask, cp=cp, return_lse=True)

        def direct(q, k, v, mask=mask):
            return burst_attention(q.sin(), k, v * 2, mask=mask, cp=cp).cos()

        def with_lse(q, k, v, mask=mask):
            out, lse = burst_attention(q.sin(), k, v, mask=mask, cp=cp, return_lse=True, scale=0.3)
            return out * lse.exp().transpose(1, 2).unsqueeze(-1)

        def by_plan(q, k, v, attend=attend):
            out, lse = attend(q * 0.5, k, v)
            return out + lse.sum()

        def with_sinks(q, k, v, mask=mask):
            sinks = k[0, 0].sum(-1).repeat(2)
            return burst_attention(q, k, v, mask=mask, cp=cp, sinks_N=sinks, softcap=2.0)

        for case in (direct, with_lse, by_plan, with_sinks):
            torch._dynamo.reset()
            program = torch.compile(case, backend=backend, fullgraph=True)
            for seed in (0, 1):
                inputs = leaves(cp, seed)
                if not all(map(torch.equal, results(program, inputs), results(case, inputs))):
                    wrong.append(f"{case.__name__} {mask} {seed}")
    return wrong


@pytest.mark.parametrize(
    ("world", "world_size", "backend", "masks"),
    [
        ("one", 1, "eager", MASKS),
        ("all", 2, "aot_eager", MASKS[2:3]),
        *slow(("one", 1, "aot_eager", MASKS), ("all", 2, "eager", MASKS), ("all", 2, "aot_eager", MASKS)),
    ],
)
def test_a_compiled_program_has_no_graph_break_and_the_bits_of_an_eager_one(world, world_size, backend, masks) -> None:
    assert run_on_ranks(world_size, compiled_and_eager, world, backend, masks) == [[]] * world_size


def ulysses() -> float:
    cp = ContextParallel()

    def attention(q, k, v):
        return burst_attention(q, k, v, cp=cp, schedule="ulysses", num_head_chunks=1)

    inputs = leaves(cp)
    found = results(torch.compile(attention, backend="aot_eager", fullgraph=True), inputs)
    return max((a - b).abs().max().item() for a, b in zip(found, results(attention, inputs), strict=True))


def test_ulysses_compiles_too() -> None:
    assert max(run_on_ranks(2, ulysses)) < 1e-6


def test_another_mask_is_another_program_and_the_first_one_comes_back() -> None:
    cp = ContextParallel.single()
    program = torch.compile(
        lambda q, k, v, mask: burst_attention(q, k, v, mask=mask, cp=cp), backend="eager", fullgraph=True
    )
    q, k, v = (t.detach() for t in leaves(cp))
    for mask in [Documents((8, 24)), Documents((9, 23)), Documents((8, 24)), SlidingWindow(3), SlidingWindow(4)]:
        assert torch.equal(program(q, k, v, mask), burst_attention(q, k, v, mask=mask, cp=cp)), mask


@dataclass(frozen=True, kw_only=True)
class NarrowWindow(SlidingWindow):
    """A mask of a user: its fields have defaults, and are no slots."""

    left: int = 2
    right: int = 1


MADE: dict[str, Callable[[], Mask]] = {
    "no fields": Full,
    "numbers": lambda: SlidingWindow(5, 2, 3),
    "documents": lambda: Documents((9, 23), left=4),
    "a pattern": lambda: BlockSparse(Strided(2), 8, causal=True),
    "own": lambda: NarrowWindow(left=3),
    "own, defaults": NarrowWindow,
}


@pytest.mark.parametrize("made", MADE.values(), ids=MADE)
def test_a_program_may_make_its_mask(made: Callable[[], Mask]) -> None:
    cp = ContextParallel.single()
    q, k, v = (t.detach() for t in leaves(cp))
    attend = prepare_attention(q, k, cp=cp)
    for call in (lambda: burst_attention(q, k, v, mask=made(), cp=cp), lambda: attend(q, k, v, made())):
        torch._dynamo.reset()
        assert torch.equal(torch.compile(call, backend="eager", fullgraph=True)(), call())


def test_another_context_or_prepared_attention_is_another_program() -> None:
    q, k, v = (t.detach() for t in leaves(ContextParallel.single()))
    contexts = [ContextParallel.single(layout) for layout in ("zigzag", "contiguous")]
    prepared = [prepare_attention(q, k, mask=mask, cp=contexts[0]) for mask in (SlidingWindow(3), SlidingWindow(4))]
    program = torch.compile(lambda attend: attend(q, k, v), backend="eager", fullgraph=True)
    for attend in (*prepared, *prepared):
        assert torch.equal(program(attend), attend(q, k, v)), attend.mask
    program = torch.compile(lambda cp: burst_attention(q, k, v, cp=cp), backend="eager", fullgraph=True)
    for cp in contexts:
        program(cp)
        assert context_named(compiled._calls[list(compiled._calls)[-1]].context) is cp


def compiled_under_documents() -> list[bool]:
    """Whether a program gives the bits of the call, for two batches that a layout deals differently."""
    cp, found = ContextParallel(layout=Balanced()), []
    program = torch.compile(
        lambda q, mask, own: burst_attention(q, q, q, mask=mask, cp=own), backend="eager", fullgraph=True
    )
    for lengths in ((20, 3, 9), (1, 30, 1)):
        mask = Documents(lengths)
        own, q = cp.under(mask), torch.randn(1, 16, 2, 4, generator=torch.Generator().manual_seed(cp.rank))
        found.append(torch.equal(program(q, mask, own), burst_attention(q, q, q, mask=mask, cp=own)))
    return found


def test_a_context_under_a_mask_is_a_context_of_its_own_in_programs() -> None:
    assert run_on_ranks(2, compiled_under_documents) == [[True, True]] * 2


@pytest.mark.parametrize("tail", [1.0, 0.5])
def test_saved_outputs_are_used_by_a_compiled_program(tail: float) -> None:
    cp = ContextParallel.single()
    q, k, v = leaves(cp)
    out, lse = burst_attention(q, k, v, cp=cp, return_lse=True, recompute=True)
    saved = save_suffix(out, lse, cp, tail)
    assert saved is not None
    marked = SavedOutput(saved.out_BLND + 1, saved.lse_BNL, saved.cut)  # seen in the result where it is used

    def again(q, k, v, saved):
        return burst_attention(q, k, v, cp=cp, saved=saved, recompute=True)

    found = torch.compile(again, backend="aot_eager", fullgraph=True)(q, k, v, marked)
    rows = round((1 - tail) * TOKENS)
    torch.testing.assert_close(found[:, :rows], out[:, :rows])
    torch.testing.assert_close(found[:, rows:], out[:, rows:] + 1)
    gradients = torch.autograd.grad(again(q, k, v, saved).sum(), (q, k, v))
    program = torch.compile(again, backend="aot_eager", fullgraph=True)
    for gradient, truth in zip(torch.autograd.grad(program(q, k, v, saved).sum(), (q, k, v)), gradients, strict=True):
        torch.testing.assert_close(gradient, truth)


def test_shapes_that_do_not_fit_are_refused_while_compiling() -> None:
    q = torch.zeros(1, 8, 4, 8)
    program = torch.compile(lambda q, k: burst_attention(q, k, k), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="not divisible by 3 KV heads"):
        program(q, torch.zeros(1, 8, 3, 8))


@pytest.mark.parametrize("operation", ["attention", "attention_backward"])
def test_the_operations_agree_with_their_fakes(operation: str) -> None:
    cp = ContextParallel.single()
    q, k, v = (t.detach() for t in leaves(cp))
    name = compiled.registered(Causal(), cp, compiled.Choices())
    shared, latent, sinks = k[:, :, :1, :4].contiguous(), v[:, :, :1].contiguous(), torch.randn(4)
    expand = torch.randn(4, q.shape[-1] - 4 + 6, latent.shape[-1])  # values of 6 dims
    for keys, sinks_N, expand_NXC in (((k, v), None, None), ((k, v), sinks, None), ((shared, latent), None, expand)):
        if operation == "attention":
            given = [None if t is None else t.clone().requires_grad_() for t in (q, *keys, sinks_N, expand_NXC)]
            torch.library.opcheck(torch.ops.burst.attention.default, (*given, name, None, None, None, 0))
            continue
        out, lse = burst_attention(q, *keys, cp=cp, return_lse=True, expand_NXC=expand_NXC)
        arguments = (q, *keys, out, lse, sinks_N, expand_NXC, torch.ones_like(out), None, name, None)
        torch.library.opcheck(torch.ops.burst.attention_backward.default, arguments)


def test_a_program_does_not_keep_its_context_and_says_so_when_it_is_gone() -> None:
    cp = ContextParallel.single()
    q, k, v = (t.detach() for t in leaves(cp))
    name = compiled.registered(Causal(), cp, compiled.Choices())
    assert compiled.registered(Causal(), cp, compiled.Choices()) == name
    del cp
    gc.collect()
    with pytest.raises(ValueError, match="no longer exists"):
        torch.ops.burst.attention(q, k, v, None, None, name, None, None, None, 0)


def test_eager_calls_do_not_go_through_the_dispatcher(monkeypatch) -> None:
    monkeypatch.setattr(compiled, "_plan", None)
    cp = ContextParallel.single()
    cp.plans = PlanCache()
    q, k, v = leaves(cp)
    burst_attention(q, k, v, cp=cp).sum().backward()
    assert q.grad is not None

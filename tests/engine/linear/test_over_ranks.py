"""A linear layer over ranks is the recurrence of the whole sequence: outputs and every gradient, in float64."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.geometry.balanced import Balanced
from engine.attention.masks import Documents
from engine.linear import chunks, kernels
from engine.linear.gated_delta import gated_delta
from engine.linear.mamba2 import state_space
from engine.linear.order import order_of
from engine.linear.reference import convolution, recurrence
from engine.linear.runs import Runs
from engine.linear.scan import StateScan
from engine.linear.shard import LinearShard, Mix
from tests.engine.linear import library
from tests.engine.parity import apart
from tests.ranks import run_on_ranks
from tests.slow import slow

KEY_HEADS, HEADS, WIDTH, VALUE, TAPS = 2, 4, 4, 6, 4
CHANNELS = 2 * KEY_HEADS * WIDTH + HEADS * VALUE
SEQ_LEN = 80  # of 8 ranks in zigzag: chunks of 5 tokens
DOCUMENTS: dict[str, tuple[int, ...]] = {
    "one text": (80,),
    "single tokens": (1, 1, 1, 7, 1, 9, 1, 1, 18, 1, 1, 38),
    "at the edges of ranks": (10, 10, 20, 40),
    "odd": (3, 27, 13, 37),
    "begin 1, 2 and 3 tokens before ranks": (19, 19, 19, 23),
    "shorter than the taps before ranks": (17, 1, 1, 18, 2, 19, 2, 20),
}
LAYOUTS = ("zigzag", "contiguous", "striped", "balanced")
KINDS = ("gated_delta_net", "mamba2")


def problem(kind: str) -> dict[str, Tensor]:
    """Whole sequences of two rows, weights of the convolution, and the gradient of the outputs."""
    generator = torch.Generator().manual_seed(len(kind))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return {
        "x": normal(2, SEQ_LEN, CHANNELS),
        "decay": normal(2, SEQ_LEN, HEADS),
        "beta": normal(2, SEQ_LEN, HEADS),
        "weight": normal(CHANNELS, TAPS),
        "bias": normal(CHANNELS),
        "dout": normal(2, SEQ_LEN, HEADS * VALUE),
    }


def in_heads(x: Tensor) -> tuple[Tensor, ...]:
    """q, k and v of channels."""
    q, k, v = x.split([KEY_HEADS * WIDTH, KEY_HEADS * WIDTH, HEADS * VALUE], -1)
    return q.unflatten(-1, (KEY_HEADS, -1)), k.unflatten(-1, (KEY_HEADS, -1)), v.unflatten(-1, (HEADS, -1))


def gates(decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Decays so weak that a state outlives the tokens of a rank."""
    return -F.softplus(4 * decay) / 20, beta.sigmoid()


def reference(kind: str, name: str) -> dict[str, Tensor]:
    """Out and gradients of the recurrence, token by token."""
    given = problem(kind)
    leaves = {key: given[key].requires_grad_() for key in given if key != "dout"}
    lengths = DOCUMENTS[name]
    heads = in_heads(convolution(leaves["x"], leaves["weight"], leaves["bias"], lengths))
    decay, beta = gates(leaves["decay"], leaves["beta"])
    out = recurrence(*heads, decay, None if kind == "mamba2" else beta, lengths)
    out.flatten(2).backward(given["dout"])
    return {"out": out.detach().flatten(2)} | gradients(leaves)


def gradients(leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: leaf.grad for key, leaf in leaves.items() if leaf.grad is not None}


def by_library(cases: list[tuple[str, str, str]]) -> dict[str, dict[str, Any]]:
    """`over_ranks` with a stand-in of flash-linear-attention."""
    with pytest.MonkeyPatch.context() as patch:
        library.install(patch)
        return over_ranks(cases)


def over_ranks(cases: list[tuple[str, str, str]]) -> dict[str, dict[str, Any]]:
    """The same on these ranks, gathered."""
    found = {}
    for kind, name, layout in cases:
        given, documents = problem(kind), Documents(DOCUMENTS[name])
        chunks.CHUNK = {"zigzag": 64, "contiguous": 16}.get(layout, 4)  # one chunk of a rank's tokens, or several
        if layout == "balanced":
            cp = ContextParallel(layout=documents.dealt(Balanced()))
        else:
            cp = ContextParallel(layout=layout)
        leaves = {key: given[key] for key in ("x", "decay", "beta")}
        leaves = {key: cp.shard(leaf, 1).clone().requires_grad_() for key, leaf in leaves.items()}
        leaves |= {key: given[key].clone().requires_grad_() for key in ("weight", "bias")}

        def mixer(x: Tensor, shard: LinearShard, kind: str = kind, leaves: dict[str, Tensor] = leaves) -> Tensor:
            channels, decay, beta = x.split([CHANNELS, HEADS, HEADS], -1)
            heads = in_heads(shard.convolved(channels, leaves["weight"], leaves["bias"]))
            decay, beta = gates(decay, beta)
            if kind == "mamba2":
                return state_space(*heads, decay, shard.runs, shard.scan, kernels.state_space_for(x)).flatten(2)
            return gated_delta(*heads, decay, beta, shard.runs, shard.scan, kernels.delta_rule_for(x)).flatten(2)

        mix = Mix(cp, None if name == "one text" else documents)
        out = mix.leave(mix(mixer, mix.enter(torch.cat([leaves["x"], leaves["decay"], leaves["beta"]], -1))))
        out.backward(cp.shard(given["dout"], 1))
        result = {"out": cp.unshard(out.detach(), 1)}
        for key, grad in gradients(leaves).items():
            if key in ("weight", "bias"):
                torch.distributed.all_reduce(grad)
                result[key] = grad
            else:
                result[key] = cp.unshard(grad, 1)
        found["/".join((kind, name, layout))] = {key: one.numpy() for key, one in result.items()}
    return found


ALL = [(kind, name, layout) for kind in KINDS for name in DOCUMENTS for layout in LAYOUTS]
CALLED = [("gated_delta_net", name, "contiguous") for name in DOCUMENTS]  # a layout only moves tokens
CALLED += [("mamba2", "at the edges of ranks", "zigzag")]


@pytest.mark.parametrize(
    ("form", "world_size", "cases"),
    [
        *((over_ranks, 1, ALL[::4]), (over_ranks, 2, ALL[1::5]), (over_ranks, 4, ALL[::3])),
        *((by_library, size, CALLED) for size in (1, 2, 4)),
        *slow((over_ranks, 2, ALL), (over_ranks, 4, ALL), (over_ranks, 8, ALL), (by_library, 4, ALL)),
    ],
)
def test_outputs_and_gradients_are_those_of_the_recurrence(form: Any, world_size: int, cases: list[Any]) -> None:
    found = run_on_ranks(world_size, form, cases)[0]
    truth = {(kind, name): reference(kind, name) for kind, name, _ in cases}
    wrong = {}
    for kind, name, layout in cases:
        expected = truth[kind, name]
        for key, tensor in expected.items():
            error = apart(found[f"{kind}/{name}/{layout}"][key], tensor.numpy())
            if not error < 1e-11:
                wrong[f"{kind}/{name}/{layout}: {key}"] = error
    assert wrong == {}


def bytes_of_scan() -> list[tuple[int, int]]:
    """Bytes this rank sends in forward, and in forward and backward, at two lengths."""
    cp, found = ContextParallel(layout="contiguous"), []
    for tokens in (3, 300):
        shard = LinearShard(Mix(cp)._shard(tokens, cp).runs, cp)
        tensors = [
            torch.randn(1, tokens, *dims, dtype=torch.float64, requires_grad=True)
            for dims in ((KEY_HEADS, WIDTH), (KEY_HEADS, WIDTH), (HEADS, VALUE), (HEADS,), (HEADS,))
        ]
        cp.traffic.reset()
        *heads, decay, beta = tensors
        out = gated_delta(*heads, -decay.square(), beta, shard.runs, shard.scan)
        forward = cp.traffic.sent_bytes
        out.sum().backward()
        found.append((forward, cp.traffic.sent_bytes))
    return found


def test_the_bytes_of_a_scan_do_not_grow_with_the_length() -> None:
    state, matrix = HEADS * WIDTH * VALUE * 8, HEADS * WIDTH * WIDTH * 8
    expected = [matrix + 2 * state, matrix + 2 * state, matrix + state, 0]  # to the next rank, then to the one after it
    found = run_on_ranks(4, bytes_of_scan)
    for rank, (short, long) in enumerate(found):
        assert short == long
        assert short[0] == expected[rank]
        assert short[1] == expected[rank] + expected[3 - rank]


def test_index_tensors_of_earlier_packed_rows_are_freed() -> None:
    rows = [Runs(tokens=64, starts=(0, start)) for start in range(1, 33)]
    orders = [order_of(Balanced((start, 64 - start)), 64, 2, 0) for start in range(1, 33)]
    places = [weakref.ref(order.on(torch.device("cpu"))[1]) for order in orders if order is not None]
    del orders
    numbers = [weakref.ref(chunks.numbers_on(row, torch.device("cpu"))) for row in rows]
    assert len(places) > 16
    for kept in (numbers, places):
        assert 2 <= sum(each() is not None for each in kept) <= 8  # of the recurrence and of the convolution at least


def reads_of_mamba(groups: int) -> int:
    """Bytes that the recurrence of 8 value heads saves for backward on a rank that continues a sequence, but for those
    of the recurrence of the rank alone."""
    tokens, heads, width, values = 32, 8, 16, 4
    q, k, v = (torch.randn(1, tokens, n, w) for n, w in ((groups, width), (groups, width), (heads, values)))
    q.requires_grad_()
    decay, saved = -torch.rand(1, tokens, heads), dict[int, int]()

    def alone(*_: object) -> tuple[Tensor, Tensor]:
        return v, torch.randn(1, heads, width, values, requires_grad=True)

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        scan: Any = lambda map_BVNN, state_BVNP: state_BVNP  # noqa: E731
        out = state_space(q, k, v, decay, Runs(tokens=tokens, before=1), scan, alone)
    assert out.requires_grad
    return sum(saved.values())


def test_queries_that_value_heads_share_are_saved_once() -> None:
    repeated = 32 * 8 * 16 * 4  # bytes of queries of every value head
    assert reads_of_mamba(1) < repeated


def states_before() -> float:
    cp = ContextParallel(layout="contiguous")
    generator = torch.Generator().manual_seed(0)
    maps, states = (torch.randn(cp.size, 1, 2, 3, n, generator=generator, dtype=torch.float64) for n in (3, 4))
    found = StateScan(cp).exclusive(maps[cp.rank], states[cp.rank])
    expected = torch.zeros_like(found)
    for rank in range(cp.rank):
        expected = maps[rank] @ expected + states[rank]
    return (found - expected).abs().max().item()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_the_scan_takes_any_number_of_ranks(world_size: int) -> None:
    assert max(run_on_ranks(world_size, states_before)) < 1e-12

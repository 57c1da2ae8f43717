"""One rank refuses a call that the others make: no rank receives tensors of another call. Ranks that all refused a
call, or that sent nothing in it, can go on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention.algorithms.saved import save_suffix
from engine.attention.masks import BlockSparse, Causal, Full, SlidingWindow
from tests.engine.attention.call.test_failed_call import FAILING_RANK, raised, short_timeout
from tests.ranks import run_on_ranks

TOKENS, HEADS, DIM = 16, 4, 8


def wholes(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(1, TOKENS, HEADS, DIM, generator=generator, dtype=torch.float64) for _ in range(3)]


def of_documents(cp: ContextParallel, step: int, odd: bool) -> Tensor:
    shards = [cp.shard(each) for each in wholes(step)]
    return burst_attention(*shards, cp=cp, cu_seqlens=[1, 4, 16] if odd else [0, 4, 16])


def of_a_scale(cp: ContextParallel, step: int, odd: bool) -> Tensor:
    return burst_attention(*(cp.shard(each) for each in wholes(step)), cp=cp, scale=0 if odd else None)


def of_other_keys(cp: ContextParallel, step: int, odd: bool) -> Tensor:
    q, k, v = (cp.shard(each) for each in wholes(step))
    return burst_attention(q, k.float() if odd else k, v, cp=cp)


def of_no_saved_output(cp: ContextParallel, step: int, odd: bool) -> Tensor:
    saved: Any = 3 if odd else None
    return burst_attention(*(cp.shard(each) for each in wholes(step)), cp=cp, saved=saved)


def unsharded(cp: ContextParallel, step: int, odd: bool) -> Tensor:
    return cp.unshard(torch.full((1, 4, 2), float(step)), dim=5 if odd else 1)


CALLS = [of_documents, of_a_scale, of_other_keys, of_no_saved_output, unsharded]


def values_after_a_refusal(call: Callable[..., Tensor], known: bool) -> list[tuple[str, str]]:
    """What three calls raise, of which one rank refuses the first: of a kind that ranks have made before, or not. Each
    that gives values has to give those of its own step."""
    cp = ContextParallel(dist.new_group(timeout=short_timeout()))
    found, rank = [], dist.get_rank()

    def checked(step: int, odd: bool) -> None:
        alone = ContextParallel.single()
        truth = torch.full((1, 8, 2), float(step)) if call is unsharded else cp.shard(call(alone, step, False))
        assert (call(cp, step, odd) - truth).abs().max() < 1e-12, "values of another step"

    if known:
        checked(0, False)
    for step in range(1, 4):
        found.append(raised(lambda step=step: checked(step, step == 1 and rank == FAILING_RANK)))
    return found


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_a_rank_that_refuses_a_known_kind_of_call_mixes_no_steps(call: Callable[..., Tensor]) -> None:
    for rank, found in enumerate(run_on_ranks(2, values_after_a_refusal, call, True)):
        kinds = [kind for kind, _ in found]
        if rank == FAILING_RANK:
            assert kinds == ["ValueError", "PeerLost", "BrokenContext"]
        else:
            assert kinds == ["PeerLost", "BrokenContext", "BrokenContext"]
            assert f"rank {FAILING_RANK} refused a call: " in found[0][1]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_of_a_new_kind_all_ranks_refuse_and_can_go_on(call: Callable[..., Tensor]) -> None:
    for found in run_on_ranks(2, values_after_a_refusal, call, False):
        assert [kind for kind, _ in found] == ["ValueError", "nothing", "nothing"]


def after_a_refusal_where_nothing_is_sent() -> list[tuple[str, str]]:
    cp = ContextParallel(dist.new_group(timeout=short_timeout()), layout="contiguous")
    q, k, v = (torch.randn(1, 8, 4, 8) for _ in range(3))
    own: dict[str, Any] = {"cu_seqlens": [0, 8, 16]}  # a document of each rank
    odd = dist.get_rank() == FAILING_RANK
    asked = [own, own | {"scale": 0 if odd else None}, {"mask": Full()}, {"mask": Causal()}, {"mask": SlidingWindow(3)}]
    found = [raised(lambda given=given: burst_attention(q, k, v, cp=cp, **given)) for given in asked]
    # A kind of call that the other rank knows already: prepared, which sends nothing either.
    found.append(raised(lambda: prepare_attention(q, k.float() if odd else k, cp=cp, scale=0 if odd else None)))
    found.append(raised(lambda: burst_attention(q, k, v, cp=cp, mask=SlidingWindow(5))))
    return found


def test_ranks_that_sent_nothing_agree_on_the_next_call() -> None:
    for rank, found in enumerate(run_on_ranks(2, after_a_refusal_where_nothing_is_sent)):
        kinds = [kind for kind, _ in found]
        refused = "ValueError" if rank == FAILING_RANK else "nothing"
        assert kinds == ["nothing", refused, "nothing", "nothing", "nothing", refused, "nothing"], found


def sinks_on_one_rank(prepared: bool) -> tuple[str, str]:
    cp = ContextParallel(dist.new_group(timeout=short_timeout()))
    q, k, v = (cp.shard(each) for each in wholes(0))
    sinks = torch.zeros(HEADS) if dist.get_rank() == FAILING_RANK else None
    if not prepared:
        compiled = torch.compile(
            lambda q, k, v: burst_attention(q, k, v, cp=cp, sinks_N=sinks), backend="eager", fullgraph=True
        )
        return raised(lambda: compiled(q, k, v))
    attend = prepare_attention(q, k, cp=cp)
    attend(q, k, v, sinks_N=torch.zeros(HEADS))
    return raised(lambda: attend(q, k, v, sinks_N=sinks))


@pytest.mark.parametrize(("prepared", "error"), [(True, "PeerLost"), (False, "ValueError")])
def test_sinks_on_one_rank_alone_are_no_call_of_both(prepared: bool, error: str) -> None:
    for kind, words in run_on_ranks(2, sinks_on_one_rank, prepared):
        assert kind == error
        assert prepared or "rank 0 has sinks False, rank 1 has sinks True" in words


def disagreements() -> dict[str, tuple[str, str]]:
    cp = ContextParallel(dist.new_group(timeout=short_timeout()))
    odd = dist.get_rank() == FAILING_RANK
    part = torch.ones(1, 4, 3)
    return {
        "gradient": raised(lambda: cp.unshard(part, gradient="same" if odd else "sum")),
        "kind": raised(lambda: cp.unshard(part) if odd else burst_attention(*(cp.shard(w) for w in wholes(0)), cp=cp)),
    }


def test_ranks_say_by_what_their_calls_differ() -> None:
    for found in run_on_ranks(2, disagreements):
        assert "rank 0 has gradient sum, rank 1 has gradient same" in found["gradient"][1]
        assert "rank 0 is in attention, rank 1 in unshard; make the same calls" in found["kind"][1]


class Gone:
    """A store whose process has ended."""

    def set(self, *_: object) -> None:
        raise RuntimeError("Broken pipe\nframe #0")


def without_a_store() -> list[tuple[str, str]]:
    cp = ContextParallel(dist.new_group())
    cp.comms._agreement._store = Gone()  # type: ignore[union-attr]
    shards = [cp.shard(each) for each in wholes(0)]
    return [raised(lambda scale=scale: burst_attention(*shards, cp=cp, scale=scale)) for scale in (0, None)]


def test_where_the_store_has_ended_a_new_kind_of_call_says_so() -> None:
    for refused, (kind, words) in run_on_ranks(2, without_a_store):
        assert refused[0] == "ValueError"
        assert kind == "PeerLost"
        assert "serves the store of their process group has ended (RuntimeError: Broken pipe); find the first" in words


Q, K, V = (torch.zeros(1, 8, 2, 8) for _ in range(3))
ATTEND = prepare_attention(Q, K, cp=ContextParallel.single())
ALONE = ContextParallel.single()


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: ATTEND(Q, K, V, saved=3), "saved is a int; pass what save_suffix returned"),
        (lambda: ATTEND(None, K, V), "q, k, v are NoneType, Tensor, Tensor; pass torch tensors"),
        (lambda: ATTEND(Q, K, [V]), "q, k, v are Tensor, Tensor, list; pass torch tensors"),
        (lambda: save_suffix(Q, torch.zeros(1, 2, 8), ALONE, "a"), "tail is 'a'; give a fraction"),
        (lambda: save_suffix(Q, None, ALONE, 0.5), "found Tensor, NoneType, ContextParallel; pass out and lse"),
        (lambda: save_suffix(Q, torch.zeros(1, 2, 8), None, 0.5), "found Tensor, Tensor, NoneType; pass out and lse"),
        (lambda: burst_attention(Q, K, V, cp=ALONE, deterministic="no"), "deterministic is 'no'; give True or False"),
        (lambda: burst_attention(Q, K, V, cp=ALONE, return_lse="no"), "is 'no'; give True or False"),
        (lambda: burst_attention(Q, K, V, cp=ALONE, scale=True), "scale is True; give a finite factor"),
        (lambda: burst_attention(Q, K, V, cp=ALONE, grad_comm_dtype=[]), "has no hash (unhashable type: 'list'); give"),
        (lambda: BlockSparse([[True]], 8, causal="no"), "a block-sparse mask has causal 'no'; give True or False"),
        (lambda: ALONE.unshard([3]), "tensor is list; pass a torch tensor"),
        (lambda: ALONE.unshard(Q, dim=9), "dim 9 is none of the 4 dimensions"),
    ],
)
def test_what_is_no_argument_is_one_sentence(call: Callable[[], object], sentence: str) -> None:
    kind, words = raised(call)
    assert kind == "ValueError"
    assert sentence in words

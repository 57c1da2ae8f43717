"""Attention calls drawn at random equal dense float64 attention: combinations that no table of cases lists.

On CPU ranks a few dozen run with every test run. `python -m tests.engine.attention.parity.test_random_calls --ranks 4
--seconds 120 --seed 7` draws until the time is over, on GPUs where there are any, and prints each call that errs.
"""

from __future__ import annotations

import argparse
import random
import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from engine import ContextParallel
from engine.attention.geometry.layout import Layout
from engine.attention.masks import parse_mask
from engine.attention.problem import GRAD_COMM_DTYPES, HeadsAndRanks, schedule_unsupported_reason
from engine.attention.reference import dense_gradients
from engine.attention.resolve import balanced
from tests.engine.attention.call.calls_in_a_row import worst_error_in_a_row
from tests.ranks import run_on_ranks
from tests.slow import slow

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
SCHEDULES = ("auto", "ring", "double_ring", "all_gather", "ulysses", "usp", "usp_transposed")
# Worst relative error of out, dq, dk, dv, as norms. In bf16 one kernel over the whole problem errs by 2 to 4 in a
# thousand; gradients that are rounded once more at each transfer err by up to twice that.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 1.2e-2}
CALLS_IN_A_ROW = 2  # enqueued without waiting, as layers of a model are


@dataclass(frozen=True)
class Drawn:
    """One problem and the choices of its call."""

    seed: int
    node_size: int
    layout: str
    batch: int
    seq_len: int
    heads: int
    kv_heads: int
    head_dim: int
    mask: str
    dtype: torch.dtype
    sinks: bool
    choices: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        choices = ", ".join(f"{name} {value}" for name, value in self.choices)
        return (
            f"seed {self.seed}: {self.batch} x {self.seq_len} tokens, {self.heads}:{self.kv_heads} x {self.head_dim} "
            f"{self.dtype}, {self.layout}, nodes of {self.node_size}, {self.mask}, "
            f"{'sinks, ' if self.sinks else ''}{choices}"
        )


def drawn(seed: int, ranks: int, on_gpu: bool) -> Drawn:
    """The call of this seed: the same on every rank and machine, always one that the engine accepts."""
    chance = random.Random(seed)
    node_size = chance.choice([size for size in range(1, ranks + 1) if ranks % size == 0])
    layout = chance.choice(("contiguous", "zigzag", "striped", "balanced"))
    kv_heads = chance.choice((1, 2, 4, 8))
    heads = kv_heads * chance.choice((1, 2, 3, 4))
    unit = 2 * ranks  # zigzag cuts the sequence into twice as many runs as there are ranks
    seq_len = unit * (chance.choice((32, 96, 250, 512)) if on_gpu else chance.choice((3, 8, 13)))
    mask = _mask(chance, seq_len)
    problem = HeadsAndRanks(cp_size=ranks, node_size=node_size, heads=heads, kv_heads=kv_heads)
    able = [name for name in SCHEDULES if name == "auto" or schedule_unsupported_reason(name, problem, layout) is None]
    schedule = chance.choice(able)
    heads_of_a_rank = kv_heads // {"ulysses": ranks, "usp": node_size, "usp_transposed": ranks // node_size}.get(
        schedule, 1
    )
    choices = {
        "schedule": schedule,
        "backward": chance.choice(("auto", "query", "key_value")),
        "exchange": chance.choice(("auto", "relay", "direct")),
        "grad_comm_dtype": chance.choice(GRAD_COMM_DTYPES),
        "num_head_chunks": chance.choice((None, 1, *([2] if heads_of_a_rank % 2 == 0 else []))),
        "recompute": chance.choice((False, True)),
        "softcap": chance.choice((None, None, 2.5)),
        "kernel": "auto" if on_gpu else "reference",
    }
    if schedule == "all_gather":  # which has no such choices
        choices |= {"backward": "auto", "exchange": "auto"}
    if schedule in ("ring", "double_ring", "all_gather"):  # which send all heads together
        choices |= {"num_head_chunks": None}
    return Drawn(
        seed, node_size, layout, chance.choice((1, 2)), seq_len, heads, kv_heads,
        chance.choice((64, 128)) if on_gpu else chance.choice((4, 8)), mask,
        torch.bfloat16 if on_gpu else torch.float64, chance.random() < 0.3, tuple(choices.items()),
    )  # fmt: skip


def _mask(chance: random.Random, seq_len: int) -> str:
    kind = chance.choice(("causal", "causal", "full", "window", "both_sides", "global", "documents", "blocks"))
    if kind in ("causal", "full"):
        return kind
    reach = chance.randrange(seq_len)
    if kind == "window":
        return f"sliding_window:{reach}"
    if kind == "both_sides":
        return f"sliding_window:{reach}:{chance.randrange(seq_len)}"
    if kind == "global":
        return f"sliding_window:{reach}:0:{chance.randrange(1, seq_len)}"
    if kind == "documents":
        cuts = sorted(chance.sample(range(1, seq_len), chance.randrange(1, min(12, seq_len - 1))))
        lengths = [after - before for before, after in zip([0, *cuts], [*cuts, seq_len], strict=True)]
        start = chance.choice([0, *cuts])
        ends = (
            "",
            ":full",
            f":left-{reach}",
            f":spans-{start}-{min(each for each in (*cuts, seq_len) if each > start)}",
        )
        return f"documents:{','.join(map(str, lengths))}{chance.choice(ends)}"
    size = max(1, seq_len // chance.choice((4, 7, 16)))
    pattern = chance.choice(("strided-3", "local_global-2-1", "local_global-3-2"))
    return f"block_sparse:{size}:{pattern}{chance.choice(('', ':causal'))}"


def error_of(call: Drawn, cp: ContextParallel, device: torch.device) -> float:
    """Worst relative error of out and all gradients over calls in a row, inf where one is not finite."""
    generator = torch.Generator(device).manual_seed(call.seed)
    shapes = [
        (call.batch, call.seq_len, n, call.head_dim) for n in (call.heads, call.kv_heads, call.kv_heads, call.heads)
    ]
    whole = [
        torch.randn(shape, generator=generator, device=device, dtype=torch.float64).to(call.dtype) for shape in shapes
    ]
    mask = parse_mask(call.mask)
    sinks_N = torch.randn(call.heads, generator=generator, device=device, dtype=torch.float64) if call.sinks else None
    softcap = dict(call.choices)["softcap"]
    truths = dense_gradients(*whole, mask, softcap=softcap, sinks_N=sinks_N)
    return worst_error_in_a_row(cp, whole, mask, dict(call.choices), truths, CALLS_IN_A_ROW, sinks_N)


def errors_of_calls(first: int, most: int, seconds: float, on_gpu: bool) -> tuple[int, dict[str, str]]:
    """How many calls ran from seed `first` on, and those that erred beyond their tolerance or raised."""
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    contexts: dict[tuple[int, str | Layout], ContextParallel] = {}
    wrong: dict[str, str] = {}
    end = time.monotonic() + seconds
    for count in range(most):
        if _any(time.monotonic() > end, device):
            return count, wrong
        call = drawn(first + count, dist.get_world_size(), on_gpu)
        key = (call.node_size, balanced(parse_mask(call.mask)) if call.layout == "balanced" else call.layout)
        if key not in contexts:
            contexts[key] = ContextParallel(node_size=call.node_size, layout=key[1])
        try:
            error = error_of(call, contexts[key], device)
        except (RuntimeError, ValueError, NotImplementedError) as failure:
            wrong[str(call)] = f"{type(failure).__name__}: {failure}"
            contexts.pop(key)  # a call that failed halfway has broken it
            continue
        if not error < TOLERANCES[call.dtype]:
            wrong[str(call)] = f"{error:.2e}"
    return most, wrong


def _any(here: bool, device: torch.device) -> bool:
    """Whether it holds on any rank: all have to stop before the same call."""
    found = torch.tensor(int(here), device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return bool(found.item())


@pytest.mark.parametrize("ranks", [2, *slow(3, 4)])
def test_calls_drawn_at_random_equal_dense_float64(ranks: int) -> None:
    for count, wrong in run_on_ranks(ranks, errors_of_calls, 1000 * ranks, 40, 600.0, False):
        assert count == 40
        assert wrong == {}


def test_what_is_drawn_covers_every_choice() -> None:
    calls = [drawn(seed, 4, False) for seed in range(400)]
    assert {dict(call.choices)["schedule"] for call in calls} == set(SCHEDULES)
    assert {call.mask.split(":")[0] for call in calls} == {
        "causal", "full", "sliding_window", "documents", "block_sparse",
    }  # fmt: skip
    assert {call.layout for call in calls} == {"contiguous", "zigzag", "striped", "balanced"}


@pytest.mark.gpu
@pytest.mark.skipif(GPUS < 2, reason="needs several CUDA GPUs")
def test_calls_drawn_at_random_equal_dense_float64_on_gpus() -> None:
    for count, wrong in run_on_ranks(GPUS, errors_of_calls, 0, 60, 240.0, True, backend="nccl"):
        assert count > 0
        assert wrong == {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=max(2, GPUS), help="one GPU each; processes where there is no GPU")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 30), help="of the first call")
    given = parser.parse_args()
    backend = "nccl" if GPUS else "gloo"
    count, wrong = run_on_ranks(
        given.ranks, errors_of_calls, given.seed, 1 << 20, given.seconds, GPUS > 0, backend=backend
    )[0]
    for call, error in wrong.items():
        print(f"{error}  {call}")
    print(f"{count} calls from seed {given.seed} on {given.ranks} ranks, {len(wrong)} wrong")
    raise SystemExit(1 if wrong or not count else 0)


if __name__ == "__main__":
    main()

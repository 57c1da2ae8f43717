"""How near `burst_attention` on one rank comes to the plain kernel call. Not a test:

    python -m tests.engine.attention.measure_host_time            # a GPU, or short sequences on the CPU
    python -m tests.engine.attention.measure_host_time --host     # host time of a call of tiny tensors alone

The plain call is FlashAttention-4's own differentiable one on a GPU (torch's flash operation where it is absent or on a
CPU). Sizes are those of docs/notes/2026-11-22-host-time-and-cuda-graphs.md: bf16 on a GPU, causal, head_dim 128, batch
1. Ten rounds; in each every size is timed with the plain call, `burst_attention` and a prepared call, one after another
in an order that turns. A figure is wall time of forward and backward, and the ratio is the plain call's time over ours:
median (least..most) of the rounds. The same inputs go to all three, and their results are compared first.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from engine import ContextParallel, burst_attention, prepare_attention
from engine.attention.kernels import kernel_named
from engine.attention.masks import Causal

GPU_SIZES = ((2048, 32, 8), (4096, 32, 32), (8192, 32, 8), (16384, 32, 32), (65536, 32, 8))
CPU_SIZES = ((16, 2, 2), (128, 4, 2), (512, 4, 2))
HEAD_DIM, ROUNDS = 128, 10
ROUND_SECONDS = 0.05  # of one size and one call: 10 rounds x 5 sizes x 3 calls stay below a minute

Call = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain_call(device: torch.device) -> tuple[str, Call]:
    """The kernel as its library offers it: differentiable, causal."""
    if device.type == "cuda" and kernel_named("fa4").unsupported_reason() is None:
        from flash_attn.cute.interface import flash_attn_func

        def fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            found = flash_attn_func(q, k, v, causal=True)
            return found[0] if isinstance(found, tuple) else found

        return "flash_attn.cute", fa4

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads_first = (t.transpose(1, 2) for t in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True, enable_gqa=grouped)
        return out.transpose(1, 2)

    return "scaled_dot_product_attention", flash


def inputs(tokens: int, heads: int, kv_heads: int, device: torch.device) -> list[Tensor]:
    """q, k, v and dout."""
    dtype, head_dim = (torch.bfloat16, HEAD_DIM) if device.type == "cuda" else (torch.float32, 16)
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(1, tokens, each, head_dim, device=device, dtype=dtype, generator=generator)
        for each in (heads, kv_heads, kv_heads, heads)
    ]


def step(call: Call, leaves: list[Tensor], dout: Tensor) -> tuple[Tensor, ...]:
    """One forward and backward."""
    return torch.autograd.grad(call(*leaves), leaves, dout)


def seconds(work: Callable[[], object], repeats: int, device: torch.device) -> float:
    """Wall time of one call, on average over `repeats` that follow each other."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started) / repeats


def compare(tokens: int, heads: int, kv_heads: int, device: torch.device, rounds: int) -> list[str]:
    """The cells of one size."""
    *shards, dout = inputs(tokens, heads, kv_heads, device)
    leaves = [t.requires_grad_() for t in shards]
    name, plain = plain_call(device)
    kernel = "fa4" if name == "flash_attn.cute" else "auto"
    cp = ContextParallel.single()
    calls: dict[str, Call] = {
        "plain": plain,
        "burst_attention": lambda q, k, v: burst_attention(q, k, v, cp=cp, kernel=kernel),
        "prepared": prepare_attention(*leaves[:2], mask=Causal(), cp=cp, kernel=kernel),
    }
    works = {label: lambda call=call: step(call, leaves, dout) for label, call in calls.items()}
    truth = works["plain"]()
    for label, work in works.items():  # compiles, plans, warms up
        for gradient, expected in zip(work(), truth, strict=True):
            worst = ((gradient - expected).abs().max() / expected.abs().max()).item()
            assert worst < 2e-2, f"{label} differs from the plain call by {worst:.3g}"
    for work in works.values():
        seconds(work, 5, device)
    repeats = max(2, min(200, round(ROUND_SECONDS / seconds(works["plain"], 3, device))))
    found: dict[str, list[float]] = {label: [] for label in works}
    labels = list(works)
    for number in range(rounds):
        turn = number % len(labels)
        for label in (*labels[turn:], *labels[:turn]):
            found[label].append(seconds(works[label], repeats, device))
    cells = [f"{tokens}", f"{heads}:{kv_heads}", f"{1e3 * statistics.median(found['plain']):.3f}"]
    for label in ("burst_attention", "prepared"):
        ratios = [plain / ours for plain, ours in zip(found["plain"], found[label], strict=True)]
        cells.append(f"{1e3 * statistics.median(found[label]):.3f}")
        cells.append(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}..{max(ratios):.3f})")
    return cells


def host_microseconds(work: Callable[[], object], repeats: int = 400, rounds: int = 7) -> float:
    """Processor time of one call in microseconds: the least of some rounds."""
    for _ in range(50):
        work()
    found = []
    for _ in range(rounds):
        started = time.process_time()
        for _ in range(repeats):
            work()
        found.append((time.process_time() - started) / repeats)
    return 1e6 * min(found)


def print_host_time() -> None:
    """What a call costs beyond its kernel, with tensors so small that the kernels take next to nothing."""
    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    *shards, dout = inputs(16, 2, 2, cpu)
    leaves = [t.requires_grad_() for t in shards]
    cp = ContextParallel.single()
    attend = prepare_attention(*leaves[:2], cp=cp, kernel="cpu")
    kernel, plan = attend.plan.kernel, attend.plan
    detached = [t.detach() for t in leaves]
    assert plan.one_call is not None
    band, scale = plan.one_call, plan.scale

    def without_gradient(call: Callable[..., object]) -> Callable[[], object]:
        def work() -> None:
            with torch.no_grad():
                call(*leaves)

        return work

    rows = {
        "the kernel, forward": lambda: kernel.forward(*detached, band, scale),
        "prepared, forward": without_gradient(attend),
        "burst_attention, forward": without_gradient(lambda *t: burst_attention(*t, cp=cp, kernel="cpu")),
        "torch's flash, forward and backward": lambda: step(plain_call(cpu)[1], leaves, dout),
        "prepared, forward and backward": lambda: step(attend, leaves, dout),
        "burst_attention, forward and backward": lambda: step(
            lambda *t: burst_attention(*t, cp=cp, kernel="cpu"), leaves, dout
        ),
    }
    print("| call | us of host time |\n| --- | --- |")
    for label, work in rows.items():
        print(f"| {label} | {host_microseconds(work):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--host", action="store_true", help="host time of tiny calls on the CPU")
    chosen = parser.parse_args()
    if chosen.host:
        print_host_time()
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    where = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(f"{where}, torch {torch.__version__}, plain call: {plain_call(device)[0]}; ms of forward and backward")
    print("| tokens | heads | plain | burst_attention | plain / burst_attention | prepared | plain / prepared |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for size in GPU_SIZES if device.type == "cuda" else CPU_SIZES:
        print(f"| {' | '.join(compare(*size, device, chosen.rounds))} |", flush=True)


if __name__ == "__main__":
    main()

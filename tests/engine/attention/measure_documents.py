"""Packed documents in `burst_attention` beside the plain call of the same kernel, on one GPU or one CPU. Not a test:

    python -m tests.engine.attention.measure_documents                     # rows of the table below, ratios
    python -m tests.engine.attention.measure_documents --heads 32:8 --head-dim 128 --rows 64x1k 8x8k

Each row is a set of documents: COUNTxLENGTH, or tail-TOKENS, whose lengths fall as 1 / rank from the longest. The plain
call is flash_attn_varlen_func of FlashAttention-4 where it is installed, torch's varlen_attn on other GPUs, and on a
CPU scaled_dot_product_attention of one document after another. Both run forward and backward of the same tensors,
alternately; times are medians, on a CPU of its own time, and the ratio is plain over ours: 1 is as fast, more is
faster.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from engine import burst_attention
from engine.attention.kernels import fa4
from engine.attention.masks import Documents

UNITS = {"k": 1 << 10, "M": 1 << 20}
GPU_ROWS = ("1x2k", "8x256", "8x2k", "8x8k", "64x1k", "1000x128", "tail-64k", "tail-128k")
CPU_ROWS = ("1x512", "8x64", "64x16", "8x128", "200x8", "tail-1k", "tail-2k")


def tokens_of(text: str) -> int:
    return int(text[:-1]) * UNITS[text[-1]] if text[-1] in UNITS else int(text)


def lengths_of(row: str) -> tuple[int, ...]:
    """Lengths of a row's documents."""
    if "x" in row:
        count, length = row.split("x")
        return (tokens_of(length),) * int(count)
    left, longest, lengths = tokens_of(row.removeprefix("tail-")), 0, []
    longest = left // 3
    while left:
        lengths.append(min(left, max(16, longest // (len(lengths) + 1))))
        left -= lengths[-1]
    return tuple(lengths)


def plain_call(
    lengths: tuple[int, ...], causal: bool, device: torch.device
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Attention of q, k, v [1, tokens, heads, head_dim] without this project."""
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=device)
    longest = max(lengths)
    if device.type == "cuda" and fa4.KERNEL.unsupported_reason() is None:
        from flash_attn.cute import flash_attn_varlen_func

        def by_fa4(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = flash_attn_varlen_func(
                q[0], k[0], v[0], cu_seqlens_q=bounds, cu_seqlens_k=bounds, max_seqlen_q=longest, max_seqlen_k=longest,
                causal=causal,
            )  # fmt: skip
            return (out[0] if isinstance(out, tuple) else out)[None]

        return by_fa4
    if device.type == "cuda":
        from torch.nn.attention.varlen import varlen_attn

        window = (-1, 0) if causal else (-1, -1)

        def by_torch(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = q.shape[2] != k.shape[2]
            named = {"window_size": window, "enable_gqa": grouped}
            return varlen_attn(q[0], k[0], v[0], bounds, bounds, longest, longest, **named)[None]

        return by_torch

    def one_by_one(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            F.scaled_dot_product_attention(*each, is_causal=causal, enable_gqa=True)
            for each in zip(*(t.transpose(1, 2).split(lengths, dim=2) for t in (q, k, v)), strict=True)
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    return one_by_one


def seconds(run: Callable[[], object], device: torch.device) -> float:
    if device.type == "cpu":
        started = time.process_time()  # others may use the machine
        run()
        return time.process_time() - started
    torch.cuda.synchronize()
    started = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def measured(row: str, heads: tuple[int, int], head_dim: int, causal: bool, repeats: int) -> tuple[float, float]:
    """(seconds of ours, of the plain call), forward and backward."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    lengths = lengths_of(row)
    q, k, v = (
        torch.randn(1, sum(lengths), count, head_dim, device=device, dtype=dtype, requires_grad=True)
        for count in (heads[0], heads[1], heads[1])
    )
    dout, mask, plain = torch.randn_like(q), Documents(lengths, causal), plain_call(lengths, causal, device)

    def step(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[], object]:
        return lambda: torch.autograd.grad(attend(q, k, v), (q, k, v), dout)

    ours, theirs = step(lambda q, k, v: burst_attention(q, k, v, mask=mask)), step(plain)
    for run in (ours, theirs, ours, theirs):
        run()
    times = [(seconds(ours, device), seconds(theirs, device)) for _ in range(repeats)]
    return statistics.median(each[0] for each in times), statistics.median(each[1] for each in times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", default=GPU_ROWS if torch.cuda.is_available() else CPU_ROWS)
    parser.add_argument("--heads", default="32:32" if torch.cuda.is_available() else "4:4", help="query:KV heads")
    parser.add_argument("--head-dim", type=int, default=128 if torch.cuda.is_available() else 64)
    parser.add_argument("--full", action="store_true", help="not causal")
    parser.add_argument("--repeats", type=int, default=21)
    chosen = parser.parse_args()
    heads, kv_heads = map(int, chosen.heads.split(":"))
    print("| documents | tokens | ours, ms | plain, ms | ratio |\n| --- | --- | --- | --- | --- |")
    for row in chosen.rows:
        lengths = lengths_of(row)
        ours, plain = measured(row, (heads, kv_heads), chosen.head_dim, not chosen.full, chosen.repeats)
        print(
            f"| {row} ({len(lengths)}) | {sum(lengths)} | {1e3 * ours:.2f} | {1e3 * plain:.2f} | {plain / ours:.2f} |"
        )


if __name__ == "__main__":
    main()

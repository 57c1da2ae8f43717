"""For which head dims FlashAttention-4 itself is right, called as its users call it. Not a test:

    python -m tests.engine.attention.kernels.measure_fa4_head_dims    # a Hopper GPU or newer; a minute of compiling

Relative errors of out, dq, dk and dv against dense float64, causal, bf16. With a version that is right for all of them
`engine.attention.kernels.fa4._zeros_beside` can go. docs/notes/2026-11-26-head-dims-of-flash-attention-4.md has the
table of version 4.0.0b36.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from engine.attention.kernels.fa4 import library
from engine.attention.masks.documents import Documents
from engine.attention.reference import dense_gradients
from engine.measurement import relative_errors

HEADS = {8: (4, 4), 80: (4, 2), 32: (4, 2), 112: (4, 4), 40: (4, 2), 208: (4, 2)}  # of each head dim: query, KV
LENGTHS = {"one": (600,), "tiny": (5, 1, 17, 9, 2, 14, 16), "mixed": (300, 1, 129, 128, 7, 459)}


def attend(q_LND: Tensor, k_LKD: Tensor, v_LKD: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """The library's call: dense for one sequence, else with cumulative lengths."""
    if len(lengths) == 1:
        found = library().flash_attn_func(q_LND[None], k_LKD[None], v_LKD[None], causal=True)
        out_BLND: Tensor = found[0] if isinstance(found, tuple) else found
        return out_BLND[0]
    ends = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=q_LND.device)
    named = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    packed = library().flash_attn_varlen_func(q_LND, k_LKD, v_LKD, causal=True, **named)
    out_LND: Tensor = packed[0] if isinstance(packed, tuple) else packed
    return out_LND


def errors(head_dim: int, heads: tuple[int, int], lengths: tuple[int, ...], device: str = "cuda") -> list[float]:
    """Of out, dq, dk and dv."""
    torch.manual_seed(0)
    q_LND, k_LKD, v_LKD, dout_LND = (
        torch.randn(sum(lengths), count, head_dim, device=device, dtype=torch.bfloat16)
        for count in (heads[0], heads[1], heads[1], heads[0])
    )
    inputs = [each.requires_grad_() for each in (q_LND, k_LKD, v_LKD)]
    out_LND = attend(q_LND, k_LKD, v_LKD, lengths)
    found = [out_LND, *torch.autograd.grad(out_LND, inputs, dout_LND)]
    q_BLND, k_BLKD, v_BLKD, dout_BLND = (each.detach()[None] for each in (*inputs, dout_LND))
    truth = dense_gradients(q_BLND, k_BLKD, v_BLKD, dout_BLND, Documents(lengths))
    return relative_errors(found, [each[0] for each in truth])


def main() -> None:
    print("| head dim | heads | sequences | out | dq | dk | dv |\n| --- | --- | --- | --- | --- | --- | --- |")
    for (head_dim, heads), (name, lengths) in itertools.product(HEADS.items(), LENGTHS.items()):
        cells = " | ".join(f"{each:.3f}" for each in errors(head_dim, heads, lengths))
        print(f"| {head_dim} | {heads[0]}:{heads[1]} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    main()

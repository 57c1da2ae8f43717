"""Hold the Triton kernel of LM head and loss against its reference implementation in float64: `python
softmax_program.py [cpu|cuda]`.

A program of its own because Triton reads TRITON_INTERPRET, which runs kernels on the CPU, when it is first imported.
"""

from __future__ import annotations

import itertools
import sys

import torch
from torch import Tensor

from engine.lm_head.loss import loss_and_gradient
from engine.lm_head.loss_kernel import IGNORE
from engine.measurement import relative_error

SMALL = (1, 2, 53, 257, 4096, 5000)  # words; 4096 is one block of the kernel
LARGE = (32000, 128256, 151937)
KINDS = ("plain", "sure label", "impossible words", "one possible word")


def rows(kind: str, tokens: int, words: int) -> tuple[Tensor, Tensor]:
    """Logits in fp32 and labels; the second token's is ignored."""
    generator = torch.Generator().manual_seed(words)
    logits_TV = 3 * torch.randn(tokens, words, generator=generator)
    labels_T = torch.randint(words, (tokens,), generator=generator)
    impossible = {"impossible words": words // 2, "one possible word": words - 1}.get(kind, 0)
    logits_TV[:, :impossible] = -torch.inf
    labels_T = labels_T.clamp(min=impossible)
    if kind == "sure label":
        logits_TV[range(tokens), labels_T] += 30
    labels_T[1:2] = IGNORE
    return logits_TV, labels_T


def faults(device: str, vocabularies: tuple[int, ...], tokens: int) -> list[str]:
    """One line for each case in which the kernel is further from float64 than its dtype explains."""
    from engine.lm_head.softmax_triton import loss_with_gradient_in_place

    found = []
    dtypes = (torch.bfloat16, torch.float32)
    for words, z_loss, dtype, kind in itertools.product(vocabularies, (0.0, 1e-2), dtypes, KINDS):
        logits_TV, labels_T = (tensor.to(device) for tensor in rows(kind, tokens, words))
        logits_TV = logits_TV.to(dtype)
        losses_T, truth_TV = loss_and_gradient(logits_TV.double(), labels_T, z_loss, torch.float64)
        loss = losses_T.sum()
        loss_T = loss_with_gradient_in_place(logits_TV, labels_T, z_loss)
        gradient_TV = logits_TV  # that is where it is now
        # bf16 has 8 bits; the interpreter cuts the others off where a GPU rounds.
        allowed = 2**-7 if dtype == torch.bfloat16 else 1e-5
        error = relative_error(gradient_TV, truth_TV)
        loss_error = abs(loss_T.double().sum() - loss).item() / max(1.0, abs(loss.item()))
        silent = not gradient_TV[labels_T == IGNORE].any()
        if not (error <= allowed and loss_error <= 1e-5 and silent):
            found.append(f"{words} words, z {z_loss}, {dtype}, {kind}: gradient {error:.1e}, loss {loss_error:.1e}")
    return found


if __name__ == "__main__":
    lines = faults(sys.argv[1], SMALL, tokens=3)
    print("\n".join(lines) or "no fault")
    sys.exit(bool(lines))

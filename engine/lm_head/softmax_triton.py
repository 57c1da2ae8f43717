"""Softmax, loss and the gradient of the logits in one Triton kernel, for a run of tokens with its whole vocabulary.

Its reference implementation is `engine.lm_head.loss.loss_and_gradient`, which passes over the logits five times and
moves 30 bytes per logit; this kernel reads each logit twice and writes its gradient once, in its place: 6 bytes in
bf16, less the cache hits of the second sweep, which therefore begins where the first one ended. Arithmetic is fp32.
Source of the running maximum and sum: online softmax, arXiv:1805.02867.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.lm_head.loss_kernel import IGNORE

BLOCK = 4096  # logits one program holds at a time: 16 for each of its threads
WARPS = 8


@triton.jit
def _loss_and_gradient_kernel(  # type: ignore[no-untyped-def]
    logits, logits_row, labels, losses, vocabulary, z_loss,
    IGNORED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # tokens x vocabulary outgrows 32 bits
    logits += row * logits_row
    label = tl.load(labels + row)
    counts = label != IGNORED
    label = tl.where(counts, label, 0)
    none = -float("inf")
    at_label = tl.load(logits + label).to(tl.float32)
    top = at_label
    others = 0.0  # sum of exp(x - top) over all words but the label: 1 - p of a sure label without cancellation
    for start in range(0, vocabulary, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < vocabulary, other=none).to(tl.float32)
        value = tl.where(column == label, none, value)  # not by the mask, which would split the load into single words
        above = tl.maximum(top, tl.max(value, axis=0))
        shift = tl.where(above == none, 0.0, above)  # only -inf so far: each adds exp(-inf - 0) = 0
        others = others * tl.exp(top - shift) + tl.sum(tl.exp(value - shift), axis=0)
        top = above
    label_exp = tl.exp(at_label - top)
    total = others + label_exp
    log_total = tl.log(total)
    lse = top + log_total
    tl.store(losses + row, tl.where(counts, log_total - (at_label - top) + z_loss * lse * lse, 0.0))
    factor = tl.where(counts, (1.0 + 2.0 * z_loss * lse) / total, 0.0)
    label_entry = tl.where(counts, (2.0 * z_loss * lse * label_exp - others) / total, 0.0)
    last = (vocabulary - 1) // BLOCK * BLOCK
    for back in range(0, vocabulary, BLOCK):
        column = last - back + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < vocabulary, other=none).to(tl.float32)
        entry = tl.where(column == label, label_entry, tl.exp(value - top) * factor)
        tl.store(logits + column, entry.to(logits.dtype.element_ty), mask=column < vocabulary)


def loss_with_gradient_in_place(logits_TV: Tensor, labels_T: Tensor, z_loss: float) -> Tensor:
    """loss_T in fp32 of logits in bf16, fp16 or fp32, whose place d loss / d logits takes.

    Ignored tokens have loss and gradient 0. Labels must be words or -100: the kernel takes them as addresses.
    """
    tokens, vocabulary = logits_TV.shape
    assert logits_TV.dtype in (torch.bfloat16, torch.float16, torch.float32)
    assert logits_TV.is_contiguous()
    loss_T = torch.empty(tokens, dtype=torch.float32, device=logits_TV.device)
    _loss_and_gradient_kernel[(tokens,)](
        logits_TV, logits_TV.stride(0), labels_T.contiguous(), loss_T,
        vocabulary, z_loss, IGNORED=IGNORE, BLOCK=min(BLOCK, triton.next_power_of_2(vocabulary)), num_warps=WARPS,
    )  # fmt: skip
    return loss_T

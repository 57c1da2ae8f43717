"""LM head and loss as one operation over the sequence: the logits of all tokens never exist together.

A 128256-word vocabulary turns 64K tokens into 31 GiB of fp32 logits. Here one tile of them at a time goes through
logits, softmax, loss and gradients; the gradients of hidden states and weight are ready when the forward ends, and
backward only scales them. `plain` is the oracle, `fused` the operation, `tiles` and `softmax` its two halves with
`softmax_triton` as the GPU's form of the second; `liger` and `cce` put two libraries behind the same call, and
`choose` takes what a trial's settings ask for. Sources: the sequence-level fusion of BurstEngine (arXiv:2509.19836);
gradients formed in the forward pass as in Liger Kernel (arXiv:2410.10989).

Shape letters: T tokens (of a tile, where there are tiles), E embedding, V vocabulary (of a tile), 1 a kept dimension.
"""

from engine.lm_head.fused import fused_loss_sum
from engine.lm_head.plain import IGNORE, plain_loss_sum

__all__ = ["IGNORE", "fused_loss_sum", "plain_loss_sum"]

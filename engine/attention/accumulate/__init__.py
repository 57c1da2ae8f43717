"""Sums of partial results: output and gradient accumulators, their Triton kernels, shapes of tensors to receive.

No communication, no masks: callers say which rows a part covers.
"""

from __future__ import annotations

# Parts of outputs and of gradients are summed together: one pass over four bf16 parts reads and writes 10 bytes an
# element, four passes over a running fp32 sum 42. Held parts take the memory of four bf16 parts at most; the running
# sum takes that of two.
WAITING_PARTS = 4

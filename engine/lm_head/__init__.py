"""LM head and loss as one operation over the sequence: the logits of all tokens never exist together.

`plain` is the reference, `fused` the operation, `tiles` and `softmax` its halves, `softmax_triton` the second one on
GPUs, `libraries` other implementations and `choose` that of a trial's settings. Sources: the sequence-level fusion of
BurstEngine (arXiv:2509.19836); gradients formed in the forward pass as in Liger Kernel (arXiv:2410.10989). No
communication; this package imports no torch, since plans read `loss_kernel`.

Shape letters: T tokens (of a tile, where there are tiles), E embedding, V vocabulary (of a tile), 1 a kept dimension.
"""

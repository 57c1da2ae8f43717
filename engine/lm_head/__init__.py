"""LM head and loss as one operation over the sequence: the logits of all tokens never exist together.

`loss` has the reference and the operation, `log_probs` its form for each token, which reinforcement learning needs,
`softmax_triton` the second half of both on GPUs, and `loss_kernel` chooses among these and libraries for a trial's
settings. Sources: the sequence-level fusion of BurstEngine (arXiv:2509.19836);
gradients formed in the forward pass as in Liger Kernel (arXiv:2410.10989). No communication; neither this package nor
`loss_kernel` imports torch, since plans read it.

Shape letters: T tokens (of a tile, where there are tiles), E embedding, V vocabulary, 1 a kept dimension.
"""

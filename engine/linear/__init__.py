"""Linear layers: mixers whose state has a fixed size, in place of attention, over the ranks that share a sequence.

`gated_delta` (arXiv:2412.06464) and `mamba2` (arXiv:2405.21060) have the recurrences, `chunks` the decays that their
chunked forms share, `kernels` chooses flash-linear-attention's kernels or those forms. A rank computes consecutive
tokens (`order`): their convolution needs the last tokens of the rank before (`convolution`), their recurrence the state
that the ranks before leave (`scan`). `shard` puts these together, with the documents of packed rows
(`runs`); `volume` counts the bytes that ranks send.

Shape letters: B batch, L tokens of this rank, H key heads, V value heads, N key dim (width of the state), P value dim,
C channels, c chunks, T tokens of a chunk.
"""

"""Operations on single tensors below attention and the model: norm, SwiGLU, RoPE, runs of tokens, autograd helpers.

Each Triton kernel has a reference implementation in torch beside it; `triton_kernels.kernels_for` chooses between them.
No process groups, no settings, and no import of any other package of the engine.
"""

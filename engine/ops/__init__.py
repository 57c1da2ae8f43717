"""Operations on single tensors below attention and the model: norm, SwiGLU, RoPE, runs of tokens, autograd helpers.

Each Triton kernel has a reference implementation in torch beside it; `autograd.kernels_for` chooses between them. No
process groups, no settings, and no import of any other package of the engine.

Here are the ranges: parts of a step that are marked for the profiler, since the same kernels run in several of them.
Entering one without a profiler costs some microseconds of the host, and nothing on the device. They are read without
torch.
"""

STEP = "burst.step"  # the timed part; everything outside it is left out of the breakdown
RECOMPUTE = "burst.recompute"  # computed again in backward: a layer, or the intermediates of a tile
OPTIMIZER = "burst.optimizer"  # clipping, the update and dropping the gradients
LM_HEAD = "burst.lm_head"  # forward of LM head and loss; the fused forms compute their gradients there as well

FLOAT8_MULTIPLE = 16  # that divides the width of every matrix in float8 (`engine.ops.float8`), which cuBLAS asks for
FLOAT8_CAPABILITY = 8.9  # compute capability of the oldest GPUs with products in float8

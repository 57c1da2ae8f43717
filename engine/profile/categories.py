"""The category of an operation on the device, or of an operator on a CPU. Pure: only names decide.

The rules use the parts of a name that a library keeps across shapes, types and releases. Those of FlashAttention,
cuDNN, PyTorch, FlexAttention, cuBLAS and NCCL were seen on H200; those of Liger, CCE, memory-efficient attention and
the kernels around cuDNN's backward were not.
"""

from __future__ import annotations

import re
from collections.abc import Set
from typing import Literal, get_args

from engine.ops.ranges import LM_HEAD, OPTIMIZER, RECOMPUTE

Category = Literal[
    "attention_forward",
    "attention_backward",
    "attention_recomputed",
    "matmul",
    "recomputed",
    "lm_head",
    "optimizer",
    "other_compute",
    "merge",
    "communication",
    "copies",
    "idle",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)  # in order of precedence where several run at once

_COPIES = re.compile(r"Mem(cpy|set)\b")
_COMMUNICATION = re.compile(r"nccl|c10d::|gloo:")
_ATTENTION_BACKWARD = re.compile(
    r"flash_bwd|flash_bprop|flex_attention_backward|fmha_cutlassB"
    r"|cudnn::fusion::(compute_dot_do_o|convert_dq)"  # before and after cuDNN's kernel
    r"|scaled_dot_product_\w*_backward|_flash_attention_backward|_efficient_attention_backward"
)
_ATTENTION_FORWARD = re.compile(
    r"flash_fwd|flash_fprop|flex_attention|fmha_cutlassF|scaled_dot_product_|_flash_attention|_efficient_attention"
)
_MATMUL = re.compile(
    r"nvjet|gemm|cublas|xmma|cutlass_\d+_|splitKreduce|gemv|triton_tem_fused_\w*mm"
    r"|aten::(mm|bmm|addmm|addmm_|addbmm|baddbmm|addmv|mv|dot|_grouped_mm)$",
    re.IGNORECASE,
)
_LM_HEAD = re.compile(r"_loss_and_gradient_kernel|log_?softmax|nll_loss|cross_entropy|_cce_|_indexed_neg_dot", re.I)
# FSDP gathers with a multi-tensor copy, which is not the optimizer's.
_OPTIMIZER = re.compile(r"multi_tensor_apply_kernel(?!.*Copy)|fused_?adam", re.I)
_MERGE = re.compile(r"_(merge|add|row_dot|stand_in)_kernel$")


def category_of(name: str, ranges: Set[str] = frozenset()) -> Category:
    """The category of the operation `name` that was launched inside these `ranges`.

    A transfer is one wherever it was launched. Of recomputed operations only attention has a category of its own. An
    operation that no rule matches is other compute.
    """
    again = RECOMPUTE in ranges
    if _COPIES.match(name):
        return "copies"
    if _COMMUNICATION.match(name):
        return "communication"
    if _ATTENTION_BACKWARD.search(name):
        return "attention_backward"
    if _ATTENTION_FORWARD.search(name):
        return "attention_recomputed" if again else "attention_forward"
    if again:
        return "recomputed"
    if OPTIMIZER in ranges or _OPTIMIZER.search(name):
        return "optimizer"
    if _MATMUL.search(name):
        return "matmul"
    if LM_HEAD in ranges or _LM_HEAD.search(name):
        return "lm_head"
    return "merge" if _MERGE.match(name) else "other_compute"

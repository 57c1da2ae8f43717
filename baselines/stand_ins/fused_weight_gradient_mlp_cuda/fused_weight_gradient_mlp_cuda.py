"""Stands for apex's extension of this name, which no package index has and Megatron-LM's output layer uses.

cuBLAS, through TransformerEngine, forms the same product of matrices and adds it to the fp32 gradient.
"""

from transformer_engine.pytorch.cpp_extensions import general_gemm


def wgrad_gemm_accum_fp32(inputs, gradient, weight_gradient):
    """weight_gradient += gradient^T inputs: fp32, from [tokens, features] in bf16."""
    general_gemm(
        inputs, gradient, out_dtype=weight_gradient.dtype, layout="NT", out=weight_gradient, grad=True, accumulate=True
    )

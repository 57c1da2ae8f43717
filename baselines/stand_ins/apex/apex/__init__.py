"""Stands for NVIDIA's apex: norms and optimizers by torch's own functions, without its fused kernels."""

from apex import multi_tensor_apply, normalization, optimizers

__all__ = ["multi_tensor_apply", "normalization", "optimizers"]

"""Stands for apex.normalization."""

from apex.normalization.fused_layer_norm import MixedFusedRMSNorm

__all__ = ["MixedFusedRMSNorm"]

"""Stands for flash-attn 2 (flash_attn): the FlashAttention-2 kernels inside torch on GPUs, torch's own on the CPU."""

from flash_attn.flash_attn_interface import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]
__version__ = "2.6.3"  # whose functions these are; systems look at it

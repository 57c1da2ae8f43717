"""Stands for flash-attn 2 (flash_attn): dense attention on the CPU, torch's own FlashAttention-2 on GPUs."""

import os

from .flash_attn_interface import flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

__all__ = ["flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]
__version__ = "2.6.3" if os.environ.get("FLASH_ATTN_STAND_IN") == "2.6" else "2.8.3"  # whose calls these are

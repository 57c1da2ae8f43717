"""Stands for flash-attn 2 (flash_attn): dense attention on the CPU; on GPUs FlashAttention-4 where it is installed, and
in attempts torch's own FlashAttention-2."""

import os
import pkgutil

# FlashAttention-4 is a package `cute` in a folder of the same name without an __init__.py.
__path__ = pkgutil.extend_path(__path__, __name__)

from .flash_attn_interface import KERNEL, flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func

__all__ = ["KERNEL", "flash_attn_func", "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func"]
__version__ = "2.6.3" if os.environ.get("FLASH_ATTN_STAND_IN") == "2.6" else "2.8.3"  # whose calls these are

"""Stands for flash-attn 2 (flash_attn) in the rings that call it: `flash_attn_interface` says what computes."""

import os
import pkgutil

# FlashAttention-4 is a package `cute` in a folder of the same name without an __init__.py.
__path__ = pkgutil.extend_path(__path__, __name__)

from .flash_attn_interface import KERNEL, flash_attn_func

__all__ = ["KERNEL", "flash_attn_func"]
__version__ = "2.6.3" if os.environ.get("FLASH_ATTN_STAND_IN") == "2.6" else "2.8.3"  # whose calls these are

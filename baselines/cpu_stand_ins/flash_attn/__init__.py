"""Dense attention under the names of flash_attn 2, for CPU ranks; no part of it is FlashAttention."""

from .flash_attn_interface import flash_attn_func as flash_attn_func

__version__ = "2.8.3"  # the release whose calls these are; systems read it
STAND_IN = True

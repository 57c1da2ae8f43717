"""Stands for flash_attn.losses."""

"""The same transfers by copy engine, through symmetric memory that the GPUs of a node write into directly.

Only on GPUs that can address each other (`peers`). Nothing outside this folder calls the CUDA driver for attention.
"""

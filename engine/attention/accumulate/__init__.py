"""Sums of partial results: output and gradient accumulators, their Triton kernels, shapes of tensors to receive.

No communication, no masks: callers say which rows a part covers.
"""

"""Device and host memory: layer inputs and attention outputs saved on either, peaks of a trial, and the GPU's state.

No model: callers say which tensors to save.
"""

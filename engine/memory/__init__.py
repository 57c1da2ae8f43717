"""Device and host memory: page-locked buffers, offloaded layer inputs and optimizer moments, peaks of a trial.

No model, no settings: callers say which tensors to store.
"""

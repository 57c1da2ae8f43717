"""What a call will send and compute, worked out before it runs: communication plan and volume, cost model.

No torch tensors and no communication: the same functions serve a plan on a laptop.
"""

"""Planning of a call before it runs: its communication plan and volume, and the cost model of schedules.

No torch tensors and no communication: the same functions serve a plan on a laptop.
"""

"""Breakdown of one step's time: a trace, and one category for every instant of it.

`capture` profiles one step on every rank; `breakdown` turns its events into seconds by category, by names and the
ranges of `engine.ops`. No tasks, no models.
"""

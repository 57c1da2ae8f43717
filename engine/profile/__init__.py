"""Breakdown of one step's time: a trace, and one category for every instant of it.

`categories` maps an operation to its category, by name and `engine.ops.ranges`; `timeline` turns events into seconds by
category; `capture` profiles one step on every rank; `unfinished` is the record's entry until then. No tasks, no models.
"""

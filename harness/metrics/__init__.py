"""Derived figures: the only FLOP formula, the peaks of GPUs, and throughput and MFU of a record.

A figure is computed when a record is read, and never stored. Nothing here is measured, printed or drawn.
"""

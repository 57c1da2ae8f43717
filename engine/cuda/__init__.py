"""CUDA below torch: driver calls that torch does not offer, and streams that no other part of the process uses.

No import of any other package of the engine.
"""

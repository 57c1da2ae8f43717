"""Distributed attention composed from small values: layout, mask, ring, exchange pattern, kernel and backward side.

Rooms, bottom first: accumulate, geometry; kernels, masks; planning; comm; `context`; algorithms; `resolve`; `op`.
A room imports only from those below it, and nothing here knows models, tasks or settings, but for `bound`.
"""

"""Distributed attention composed from small values: layout, mask, ring, exchange pattern, kernel and backward side.

Packages and modules, lowest first: accumulate, geometry; kernels, masks; `problem`; `comm_plan`; `comm_volume`, `cost`;
`resolve`; comm; `context`; algorithms; `plan`, `op`; `prepared`. Each imports only those before it. Nothing here knows
models or tasks; of a trial's settings `problem` and `resolve` read what attention needs.
"""

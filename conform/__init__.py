"""`burst conform`: does an implementation of context parallelism, ours or another, compute the right numbers?

`target.py` defines the file in which an implementation presents itself, `cases.py` the problems it has to solve.
`reference.py` solves them in float64 on one process, and `compare.py` finds what differs and where. `run.py` starts the
ranks, `report.py` writes the results, and `targets/` holds the systems that are known by name. Commands and records of
the benchmark are not imported.
"""

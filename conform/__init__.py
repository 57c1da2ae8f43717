"""`burst conform`: does an implementation of context parallelism, ours or another, compute the right numbers?

`target.py` says what an implementation offers, `cases.py` what it is asked. `reference.py` computes the truth in
float64 on one process, `compare.py` says what is wrong and where. `run.py` starts the ranks, `report.py` writes the
results, and `targets/` holds the systems that are known by name. Commands and records of the benchmark are not
imported.
"""

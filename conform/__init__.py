"""`burst conform`: is somebody's context parallelism right? Any implementation, judged by float64 on one process.

`target.py` is what an implementation offers to be judged, `cases.py` what it is asked, `reference.py` the truth,
`compare.py` what is wrong and where, `run.py` the ranks, `report.py` what is printed, and `targets/` the systems that
are known by name. Nothing of the benchmark's commands or records is imported.
"""

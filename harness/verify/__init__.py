"""A second look at what a run left: records, figures computed again by other code, provenance; and archives of runs.

Nothing here changes a run. `formulas` and `pairs` share no code with `harness.metrics.throughput` and `flops`.
"""

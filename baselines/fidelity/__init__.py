"""`burst setup baselines fidelity`: compared systems on CPU ranks, beside float64 and our native baselines.

Reading order: `cases` says what runs, `attention` and `training` start a system's cases and compare what came out,
`native` is the program of our own forms, `table` holds what was found and writes it, `run` is the whole.
"""

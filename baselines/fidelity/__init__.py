"""`burst baselines fidelity`: compared systems on CPU ranks, beside float64 and our native baselines.

Reading order: `cases` and `training_cases` say what runs, `ranks` starts programs, `native` is the program of our own
forms, `attention` and `training` run a system's cases and compare what came out, `rows` holds what was found about one,
`table` writes all of them, `run` is the whole.
"""

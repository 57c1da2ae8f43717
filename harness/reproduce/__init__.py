"""The paper beside our records: its figures, its claims, and its numbers recomputed.

Published numbers are those of results/paper, ours those of records; what needs no measurement is computed. Nothing here
starts a trial. Words stand in results/paper/*.yaml, verdicts and numbers follow from data.
"""

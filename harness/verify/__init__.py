"""A second look at what a run left: records that agree with themselves, results, tables and figures that are those of
the records, provenance, hashes; and archives of runs. Nothing here changes a run.
"""

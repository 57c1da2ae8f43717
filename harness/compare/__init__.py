"""Trials of equal settings in pairs: of two directories, of two methods in one run, or of two commits.

`sources` finds the records, `pairs` puts them together and judges each pair, `report` says it.
"""

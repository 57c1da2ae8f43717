"""Trials of equal settings in pairs: of two directories, of two methods in one run, or of two commits.

`pairs` finds the records, puts them together and judges each pair, `report` says it.
"""

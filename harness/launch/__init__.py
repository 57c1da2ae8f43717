"""Launchers: they start the ranks of one job, watch and end them, and return its outcome.

`launcher` has the interface. It serves one machine without Ray (`supervisor`), embedded Ray (`ray`), and a Ray cluster
over SSH (`nodes`). No launcher reads experiments or plans, or writes records.
"""

"""Launchers: they start the ranks of one job, watch and end them, and return its outcome.

`launcher` has the interface. It serves one machine without Ray (`supervisor`) and the hosts of a Ray cluster (`ray`),
also of one that `burst cluster up` started over SSH. No launcher reads experiments or plans, or writes records.
"""

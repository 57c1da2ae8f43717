"""Ranks on several hosts: one supervisor per host of an ordinary Ray cluster, and the launcher that uses them.

`connection` joins a cluster, `host` is the supervisor's end on each host, `watch` follows one job, `launcher` chooses
hosts and judges jobs, `inventory` finds the cluster that a command line names.
"""

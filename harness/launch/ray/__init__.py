"""Ranks on several hosts: one supervisor per host of an ordinary Ray cluster, and the launcher that uses them.

`connection` joins a cluster, `host` is the supervisor's end on each host, `job` runs one job on its hosts and judges
it, `watch` follows that job, `launcher` reserves and chooses hosts, `inventory` finds the cluster that a command line
names.
"""

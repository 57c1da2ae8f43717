"""The harness: from an experiment file to records, tables, figures and a report.

It starts trials and reads their measurements; what a rank computes is in `engine`, SSH and nodes are in `cluster`.
A room imports only rooms below it: base | records, spec | machine, metrics | plan, report, launch | run | training |
commands | cli.
"""

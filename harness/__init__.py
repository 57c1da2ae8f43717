"""The harness: from an experiment file to records, tables, figures and a report.

It starts trials and reads their measurements; what a rank computes is in `engine`, SSH and nodes are in `cluster`.
A package imports only packages below it, lowest first: base | records, spec | machine, metrics | predict |
plan, report, launch | run, compare, verify | training, reproduce | commands | cli.
"""

"""Nodes: their inventory, the commands that reach them, the checks whether they are fit to run on, and Ray on them.

`cluster` stands alone: it imports nothing of engine, harness and baselines. Its packages and their order are the
contract "cluster" of import-linter in pyproject.toml.
"""

"""Probes and verdicts: the script that runs all probes of a node, readers of nvidia-smi, and the result of a check.

Imports `inventory` and packages below; neither a check nor a connection belongs here.
"""

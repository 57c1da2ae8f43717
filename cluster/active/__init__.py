"""Active tests: what nodes measure when they are loaded. `python -m cluster.active` is the part that runs on a node.

Only `kernels` and `collective` need torch, and import it when they are called: the launching side does without.
"""

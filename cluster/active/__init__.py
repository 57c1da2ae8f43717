"""Active tests: speeds of loaded nodes. `python -m cluster.active` is the part that runs on a node.

Only `measure` imports torch, and only the worker imports it: the launching side runs without torch.
Imports `discovery`, `probing`, `profiles`, `transport` and packages below; no check and no report belongs here.
"""

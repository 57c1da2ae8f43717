"""Active tests: speeds of loaded nodes. `python -m cluster.active` is the part that runs on a node.

Only `kernels` and `collective` import torch, and only the worker imports these: the launching side runs without torch.
Imports `probing`, `profiles`, `transport` and packages below; no check and no report belongs here.
"""

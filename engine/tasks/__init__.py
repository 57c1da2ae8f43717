"""One trial on one rank: the tasks train, attention, lm_head and linear, their checks against float64, and speeds.

`engine.worker` runs them. Nothing here starts processes or knows the harness; `products` and `cuda_graph` import no
torch.
"""

"""One trial on one rank: the tasks train, attention and lm_head, their checks against float64, and measured speeds.

`engine.worker` runs them. Nothing here starts processes or knows the harness; `products` and `cuda_graph` import no
torch.
"""

"""One trial on one rank: the tasks train, attention and lm_head, step times, phases, turns.

`engine.worker` runs them. Nothing here starts processes or knows the harness; `turns` and `phases` import no torch.
"""

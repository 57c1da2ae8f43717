"""Selective checkpointing: which layers backward computes again, from which saved inputs and attention outputs.

Sequence-level selective checkpointing is BurstEngine's (arXiv:2509.19836); docs/memory.md has the arithmetic.
`counts` is imported where memory is planned, so this package imports no torch.
"""

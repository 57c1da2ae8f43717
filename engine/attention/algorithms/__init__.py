"""The algorithms of attention over many ranks: ring attention, Ulysses around it, and what a call saves for another.

A plan here composes kernel, mask, communication plan and exchange. No cost model, no choice of `auto`, no transport.
"""

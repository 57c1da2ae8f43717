"""`burst setup baselines`: installations of the compared systems, each in an environment of its own, as its pin says.

`places` knows where they lie and in which state, `interpreter` finds Python and torch, `packages` calls pip, `build`
puts an installation together, `verify` compares one with its pin, `bundle` packs what a machine without a network
needs.
"""

"""The network of a node: `read` turns the output of probes into `facts`, `hcas` chooses from those, `drift` compares
nodes.

Imports `probing`, `transport` and packages below. Choices are pure: they depend on facts and the site alone.
"""

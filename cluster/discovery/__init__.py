"""The network of a node: `script` holds the probes, `read` turns their output into `facts`, `interface` and `hcas`
choose from those, `drift` compares nodes.

Imports `probing`, `transport` and packages below. Choices are pure: they depend on facts and the site alone.
"""

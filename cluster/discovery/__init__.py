"""Finding out what a node's network is: probes that read it, facts they become, and pure choices made from those.

`script` asks, `parse` turns answers into `facts`, `interface` and `hcas` choose, `drift` compares nodes, `read` does
the first two on a node.
"""

"""Container images: built here, saved once, brought to every node that lacks them, and verified there.

`engine` is what is said to docker, `archive` the saved image, `sending` its way to a node, `delivery` everything that
happens on one node, `push` all nodes at once.
"""

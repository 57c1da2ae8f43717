"""Container images: built and saved here, delivered to every node that lacks them, and verified there.

`engine` holds docker's command lines, `archive` the saved image, `sending` one transfer, `delivery` the work on one
node, `push` all nodes. Imports `transport`, `inventory` and `files`; nothing of checks or environments.
"""

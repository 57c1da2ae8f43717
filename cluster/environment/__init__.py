"""The environment variables of a node and its ranks, each with a reason. `burst cluster env` and launches use them.

`ranks` states values, `rendering` lays the site's own over them, `survey` asks many nodes and writes env.sh there.
Imports `discovery`, `probing`, `transport` and packages below; no check and no report belongs here.
"""

"""The environment variables of a node and its ranks, each with a reason. `burst env` and launches use them.

`ranks` states values, `rendering` lays the site's own over them and writes env.sh, `importing` reads an existing file.
Imports `discovery`, `probing`, `transport` and packages below; no check and no report belongs here.
"""

"""The environment variables of a node and its ranks: one place decides every value and says why.

`network`, `processes` and `trial` state values, `rendering` lays the site's own over them and writes env.sh,
`importing` reads a file that exists already. `burst env` shows it; launches use the same values.
"""

"""Commands and files to hosts: on this machine, over SSH, and on many nodes at once.

Imports `inventory` and `files` alone. A host is a `Host` here; nothing is judged.
"""

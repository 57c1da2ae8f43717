"""Files and messages: strict YAML, text files, locks, folders, and the sentences a user sees.

The lowest room: it imports no other room of cluster.
"""

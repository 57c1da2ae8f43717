"""Files and messages: strict YAML, text files, locks, folders, and the sentences a user sees.

The lowest package: it imports no other package of cluster.
"""

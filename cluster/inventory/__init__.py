"""Nodes and sites: hosts as a user names them, inventory files, the expectations and the software of a site.

Imports `files` alone. No connection is opened here and no node is read.
"""

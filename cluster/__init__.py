"""Nodes: who they are, how a command reaches them, whether they are fit to run on. Imports nothing else of ours."""

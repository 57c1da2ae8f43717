"""cluster.probing"""

"""cluster.transport"""

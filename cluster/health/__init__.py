"""cluster.health"""

"""cluster.inventory"""

"""engine.attention.planning"""

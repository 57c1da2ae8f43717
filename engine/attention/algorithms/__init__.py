"""engine.attention.algorithms"""

"""engine.attention.geometry"""

"""engine.attention.accumulate"""

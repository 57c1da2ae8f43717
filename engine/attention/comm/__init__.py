"""engine.attention.comm"""

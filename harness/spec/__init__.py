"""harness.spec"""

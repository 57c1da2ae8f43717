"""harness.records"""

"""harness.base"""

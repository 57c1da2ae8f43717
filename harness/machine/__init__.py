"""harness.machine"""

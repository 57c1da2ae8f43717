"""harness.plan"""

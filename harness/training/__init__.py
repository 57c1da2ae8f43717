"""harness.training"""

"""harness.launch"""

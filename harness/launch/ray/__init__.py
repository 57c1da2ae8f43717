"""harness.launch.ray"""

"""harness.launch.nodes"""

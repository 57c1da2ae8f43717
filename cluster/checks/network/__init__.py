"""Checks of the adapters and interfaces between nodes, and of the settings that they need."""

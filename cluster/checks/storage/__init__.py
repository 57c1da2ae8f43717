"""Checks of disks and shared storage."""

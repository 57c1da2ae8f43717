"""Architectures: one torch-free file each, and the module that is assembled from their features."""

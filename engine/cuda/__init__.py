"""CUDA beneath torch: the driver calls and streams of our own."""

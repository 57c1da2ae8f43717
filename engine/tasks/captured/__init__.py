"""A training step of one GPU as CUDA graphs: which settings allow it, and its capture. `choice` imports no torch.

Up to some thousands of tokens the host takes longer to launch a step's kernels than the GPU to run them. A CUDA graph
launches all of them at once.
"""

"""Sending between ranks: p2p transport, exchange patterns of a ring, all-to-all, nodes and links; symm_mem by copy engine.

No attention mathematics: tensors and token ranges come from the caller.
"""

"""Sending between ranks: p2p transport, exchange patterns of a ring, all-to-all, nodes, link speed, copy engines.

No attention mathematics: tensors and token ranges come from the caller.
"""

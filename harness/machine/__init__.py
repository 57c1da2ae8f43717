"""The hosts that trials may use: their GPUs, cores, memory and addresses, and `burst doctor`'s findings.

Hosts are described here. Ranks are started in `launch`; nodes are reached over SSH in `cluster`.
"""

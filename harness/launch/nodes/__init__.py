"""The launcher for a Ray cluster: one supervisor per host, and one outcome from all that they saw.

The cluster itself is started and ended in `cluster.ray_cluster`; ranks are started by `launch.supervisor` on each host.
"""

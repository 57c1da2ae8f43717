"""Ray beside the harness: embedded on one machine, or joined as a guest of a cluster; and its cleaning up.

Only this folder and `launch.nodes` import Ray, and only when a launcher needs it.
"""

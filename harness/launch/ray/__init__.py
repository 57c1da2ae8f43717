"""Ray for the launchers: embedded on one machine, or a driver's connection to a cluster; and the removal of its files.

Only this folder and `launch.nodes` import Ray, and only when a launcher needs it.
"""

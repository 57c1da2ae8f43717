"""The execution of a plan: the run's directory, one attempt after another, progress, and resuming.

Ranks are started by the launcher that a run is given; tables and figures are made in `report`.
"""

"""How figures look and what they share: colours, panels, points, bars, lines, notes.

A module of `harness.report.figures` says what is drawn; these say how.
"""

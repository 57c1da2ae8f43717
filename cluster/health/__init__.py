"""Node checks as a whole: all nodes at once, a report for each, and error counters from one run to the next.

Imports `checks`, `profiles`, `probing`, `transport` and packages below; nothing here formats a report.
"""

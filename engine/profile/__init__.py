"""Where one step's time goes: a trace of it, and every instant of the trace given to one category.

ranges.py     names of the parts of a step that a kernel's own name does not tell
categories.py what an operation belongs to, by its name and the parts it was launched in
timeline.py   from a trace's events to seconds by category
unfinished.py what stands for the seconds until they are there
capture.py    profiling one step on every rank, the trace file, and the slowest rank's seconds
"""

"""One record per trial: its settings, provenance and raw measurements, written and read strictly.

No derived figure is computed here; `harness.metrics` does that on reading.
"""

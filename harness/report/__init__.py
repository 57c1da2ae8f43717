"""Reports from records alone: rows, tables, figures, sentences, one HTML file per run and a site of several.

Nothing here starts a trial or derives a figure that `harness.metrics` could derive.
"""

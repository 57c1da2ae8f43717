"""Parts that every room uses: errors, interrupts, sequence lengths, the terminal.

Nothing here knows an experiment, a trial or a record, and nothing here imports another room of the harness.
"""

"""Parts that every package uses: errors, interrupts, sequence lengths, the terminal.

No part depends on an experiment, a trial or a record, and none imports another package of the harness.
"""

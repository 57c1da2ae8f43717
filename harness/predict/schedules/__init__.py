"""Schedules of attention inside one node: measured steps beside the cost model, and the fit of its constants."""

"""The orchestrator: from an experiment file to a report."""

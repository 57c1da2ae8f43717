"""What every test shares: properties are tried on the same examples each time, and never against a clock.

A run that fails is then the change's fault, not the seed's. `--hypothesis-profile=explore` looks at new examples.
"""

import os
import signal

import pytest
from hypothesis import settings

from cluster.files import progress

# Read when torch is loaded, so it stands before every import of it. OpenMP's threads otherwise spin while they wait for
# one that has no core: on a busy machine small tensors took seven times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# A shell starts what runs in its background with SIGINT ignored, which the programs of these tests would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def no_lines_by_the_clock(monkeypatch):
    """What commands say because they take long depends on how busy the machine is."""
    monkeypatch.setattr(progress, "FIRST_SECONDS", 3600.0)


settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeatable")

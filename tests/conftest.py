"""What every test shares: properties are tried on the same examples each time, and never against a clock.

A run that fails is then the change's fault, not the seed's. `--hypothesis-profile=explore` looks at new examples.
"""

import os

from hypothesis import settings

# Read when torch is loaded, so it stands before every import of it. OpenMP's threads otherwise spin while they wait for
# one that has no core: on a busy machine small tensors took seven times the processor time.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeatable")

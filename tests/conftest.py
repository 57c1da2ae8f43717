"""What every test shares: properties are tried on the same examples each time, and never against a clock.

A run that fails is then the change's fault, not the seed's. `--hypothesis-profile=explore` looks at new examples.
"""

from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=2000)
settings.load_profile("repeatable")

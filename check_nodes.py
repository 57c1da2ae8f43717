#!/usr/bin/env python3
"""Node health: hosts in, verdicts out. `python check_nodes.py gpu[01-04]`; without hosts it checks this machine."""

import sys

from cluster.cli import main

if __name__ == "__main__":
    sys.exit(main())

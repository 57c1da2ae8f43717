"""The program `burst`, and `python -m harness`.

It looks for the packages of the extra `harness` first: without them `import burst` works, and the commands do not.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

# Modules of the extra `harness` of pyproject.toml.
MODULES = ("pandas", "matplotlib", "jinja2", "itables", "yaml", "rich", "paramiko")


def main() -> int:
    """Run the command on this process's command line; returns the exit code."""
    if absent := [name for name in MODULES if find_spec(name) is None]:
        print(
            f"burst: found no {', '.join(absent)}, which the commands of burst need (`import burst` works without); "
            "install them with: pip install 'burst-harness[harness]'",
            file=sys.stderr,
        )
        return 2
    from harness.cli import main as command

    return command()


if __name__ == "__main__":
    sys.exit(main())

"""The program `burst`, and `python -m harness`.

Without the extra `harness`, `import burst` works and a command says what to install, once it needs what is absent: some
machines have a part of it, and run trials with that.
"""

from __future__ import annotations

import sys

# Modules of the extra `harness` of pyproject.toml.
MODULES = ("pandas", "matplotlib", "jinja2", "itables", "yaml", "rich", "paramiko")


def main() -> int:
    """Run the command on this process's command line; returns the exit code."""
    try:
        from harness.cli import main as command

        return command()
    except ModuleNotFoundError as error:
        absent = (error.name or "").partition(".")[0]
        if absent not in MODULES:
            raise
        print(
            f"burst: found no {absent}, which this command needs (`import burst` works without); install it with: "
            "pip install 'burst-harness[harness]'",
            file=sys.stderr,
        )
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""Run by the interpreter of a compared system: what is installed there, and whether it is as its wheels were.

`python look.py MODULE...` prints one line of JSON: Python, torch, the version of each installed package, files that
differ from the hashes that pip noted, and the error of each module that cannot be imported. Python 3.10 runs it.
"""

import base64
import hashlib
import importlib
import importlib.metadata
import json
import os
import sys

MARK = "BASELINE "


def changed_files(distribution):
    """Files of an installed package that are missing or differ from its RECORD."""
    for file in distribution.files or ():
        if file.hash is None or str(file).endswith(".pyc"):
            continue
        path = distribution.locate_file(file)
        try:
            with open(path, "rb") as opened:
                digest = hashlib.new(file.hash.mode, opened.read()).digest()
        except OSError:
            yield f"{file} is missing"
            continue
        if base64.urlsafe_b64encode(digest).rstrip(b"=").decode() != file.hash.value:
            yield f"{file} differs"


def main():
    sys.path[:1] = []  # the folder of this program
    here = os.path.realpath(os.path.join(sys.prefix, "lib"))
    own = [d for d in importlib.metadata.distributions() if os.path.realpath(str(d.locate_file(""))).startswith(here)]
    errors = {}
    for name in sys.argv[1:]:
        try:
            importlib.import_module(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a foreign module raises is what is reported
            errors[name] = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:1])}"
    torch = sys.modules.get("torch")
    found = {
        "python": ".".join(map(str, sys.version_info[:3])),
        "torch": str(getattr(torch, "__version__", "")),
        "cuda": str(getattr(getattr(torch, "version", None), "cuda", None) or ""),
        "packages": {d.metadata["Name"]: d.version for d in own},
        "changed": [line for d in own for line in changed_files(d)],
        "errors": errors,
    }
    print(MARK + json.dumps(found), flush=True)


main()

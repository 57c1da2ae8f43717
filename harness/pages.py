"""The pages of a checkout: numbers of its published records, and verdicts on the paper's claims, between markers.

    python -m harness.pages           # or: make docs

`harness.report.quoted` reads the markers and computes numbers and tables of records. The table of claims is made by the
code behind `burst reproduce claims`, so that the command and docs/paper.md give one verdict.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.base.errors import UsageError
from harness.report.quoted import RECORDS, Quotes, write_pages
from harness.reproduce.claims import claims_lines, judged
from harness.reproduce.measured import all_rows, runs_in

CLAIMS = "claims"  # name of the marker


def quotes_of(root: Path) -> Quotes:
    """What pages of the checkout at `root` may quote. Its own published records decide on claims, local runs do not."""
    return Quotes(root, {CLAIMS: lambda: claims_lines(judged(all_rows(runs_in([root / RECORDS]))))})


if __name__ == "__main__":
    try:
        write_pages(quotes_of(Path(__file__).parents[1]))
    except UsageError as found:
        sys.exit(str(found))

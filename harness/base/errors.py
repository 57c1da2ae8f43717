"""Errors of which `burst` prints the one sentence. `cluster` defines those that the user can correct, because it reads
files and does not import the harness."""

from cluster.files.errors import UsageError as UsageError
from cluster.files.errors import nearest as nearest
from cluster.files.errors import one_of as one_of

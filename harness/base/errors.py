"""Errors that the user can correct. `cluster` defines them, because it reads files and does not import the harness."""

from cluster.files.errors import UsageError as UsageError
from cluster.files.errors import nearest as nearest
from cluster.files.errors import one_of as one_of

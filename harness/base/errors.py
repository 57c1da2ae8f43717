"""Errors that are the user's to mend. They are defined where files are read, in `cluster`, which knows no harness."""

from cluster.files.errors import UsageError as UsageError
from cluster.files.errors import nearest as nearest
from cluster.files.errors import one_of as one_of

"""Tokens of real text in memory-mapped files, and batches that are equal for every method and CP size.

Reading order: `sources` rejects files that are no text and yields a text's bytes, `tokenizers` turns them into token
ids, `store` writes and reads stores, `sequences` divides them into training and validation text and assigns sequences
to steps and replicas. No model and no process groups; importing this package imports no torch, because programs that
only plan also build and read stores.
"""

from engine.data.sources import PYTHON_DOCS as PYTHON_DOCS
from engine.data.store import TokenStore as TokenStore
from engine.data.store import is_built as is_built
from engine.data.store import open_tokens as open_tokens
from engine.data.store import vocabulary_of as vocabulary_of

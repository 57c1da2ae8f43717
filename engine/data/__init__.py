"""Tokens of real text in memory-mapped files, and batches that are equal for every method and CP size.

Reading order: `formats` rejects files that are no text, `sources` yields a text's bytes, `tokenizers` turns them into
token ids, `build` writes a store, `store` reads one, `cache` holds those built on first use, `sequences` assigns
sequences to steps and replicas, `held_out` separates training from validation text. No model and no process groups;
importing this package imports no torch, because programs that only plan also build and read stores.
"""

from engine.data.cache import cache_dir as cache_dir
from engine.data.cache import is_built as is_built
from engine.data.cache import open_tokens as open_tokens
from engine.data.cache import vocabulary_of as vocabulary_of
from engine.data.sources import PYTHON_DOCS as PYTHON_DOCS
from engine.data.store import TokenStore as TokenStore

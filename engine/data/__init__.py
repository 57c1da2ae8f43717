"""Tokens of real text in memory-mapped files, and the batches every method and CP size reads alike.

Reading order: `formats` says which files are no text, `sources` yields a text's bytes, `tokenizers` turns them into
token ids, `build` writes a store, `store` reads one back, `cache` keeps those built on first use, `sequences` deals
sequences to steps and replicas, `held_out` parts text to learn from text to judge by. Importing this package imports no
torch: stores are also built and looked at by programs that only plan.
"""

from engine.data.cache import cache_dir as cache_dir
from engine.data.cache import is_built as is_built
from engine.data.cache import open_tokens as open_tokens
from engine.data.cache import vocabulary_of as vocabulary_of
from engine.data.sources import PYTHON_DOCS as PYTHON_DOCS
from engine.data.store import TokenStore as TokenStore

"""Writing a token store: aside, flushed, then renamed, so that it appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from engine.data.sources import chunks_of, name_of
from engine.data.store import HEADER_FILE, TOKENS_FILE, Header, TokenType
from engine.data.tokenizers import Tokenizer


def build_store(sources: Sequence[str], directory: Path, tokenizer: Tokenizer, validation: float = 0.0) -> Header:
    """Tokenize texts, each one document, into a new store at `directory`.

    Args:
        sources: `python_docs` or paths of UTF-8 text files, in the order in which they are to be read.
        directory: must not exist; its parent is made.
        tokenizer: decides ids, their width in the file, and whether a token separates the documents.
        validation: fraction of the tokens held out, at the end.

    Raises:
        ValueError: a text is missing, empty or not UTF-8, or too short for the fraction held out.
        FileExistsError: `directory` exists, possibly since another process finished first.
        OSError: it cannot be written.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    aside.chmod(0o755)  # mkdtemp's is for the user alone
    dtype = token_type(tokenizer.vocabulary)
    try:
        digest, documents = hashlib.sha256(), []
        with open(aside / TOKENS_FILE, "wb") as file:
            for source in sources:
                documents.append(_write_document(source, file, tokenizer, dtype, digest))
            file.flush()
            os.fsync(file.fileno())
        count = sum(document["tokens"] for document in documents)
        held_out = int(count * validation)
        if validation and not held_out:
            raise ValueError(
                f"{validation:g} of {count} tokens is less than one token; "
                "give `burst data` a larger --validation, or 0"
            )
        header = Header(
            origin=", ".join(document["name"] for document in documents),
            python=platform.python_version(),
            sha256=digest.hexdigest(),
            tokenizer=tokenizer.name,
            count=count,
            vocabulary=tokenizer.vocabulary,
            dtype=dtype,
            validation=held_out,
            tokenizer_sha256=tokenizer.sha256,
            end_of_text=tokenizer.end_of_text,
            documents=documents,
        )
        (aside / HEADER_FILE).write_text(json.dumps(asdict(header), indent=1) + "\n", encoding="utf-8")
        if directory.exists():  # renaming would replace an empty directory
            raise FileExistsError(f"{directory} exists")
        aside.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)  # gone already when the rename succeeded
    return header


def token_type(vocabulary: int) -> TokenType:
    """The narrowest unsigned integer that holds every id below `vocabulary`."""
    for dtype, bits in (("uint8", 8), ("uint16", 16)):
        if vocabulary <= 1 << bits:
            return dtype  # type: ignore[return-value]
    return "uint32"


def _write_document(source: str, file: BinaryIO, tokenizer: Tokenizer, dtype: TokenType, digest: Any) -> dict[str, Any]:
    """Append one text's tokens; returns its name, sha256 and number of tokens. `digest` is of all texts together."""
    own, size, tokens = hashlib.sha256(), 0, 0
    saved = np.dtype(dtype).newbyteorder("<")

    def read() -> Iterator[bytes]:
        nonlocal size
        for chunk in chunks_of(source):
            digest.update(chunk)
            own.update(chunk)
            size += len(chunk)
            yield chunk

    for ids in tokenizer.encode(read()):
        file.write(ids.astype(saved, copy=False).tobytes())
        tokens += len(ids)
    if size == 0:
        raise ValueError(f"data {source!r} is empty; give a text of at least one byte")
    if tokenizer.end_of_text is not None:
        file.write(np.array([tokenizer.end_of_text], dtype=saved).tobytes())
        tokens += 1
    return {"name": name_of(source), "sha256": own.hexdigest(), "tokens": tokens}

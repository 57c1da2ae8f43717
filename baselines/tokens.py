"""The engine's own tokens, in files that a compared system reads: every system trains on the same sequences.

Sequence i of a trial is `seq_len` tokens and the label of the last one, as `engine.data.sequences` numbers them: those
of a step follow one another, and overlap by one token, so that all of them are one run of tokens.

`plain`     tokens.bin, 32-bit integers, for programs of ours around a system's trainer
`megatron`  one dataset of Megatron's own format for each sequence: <i>.bin and <i>.idx. Megatron-LM shuffles the
            sequences of a dataset, and takes datasets without weights in the order of its command line; so the order is
            the engine's
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from engine.atomic import write_atomic
from engine.data import open_tokens

if TYPE_CHECKING:
    from engine.settings import TrialSettings

TokenFormat = Literal["", "plain", "megatron"]
FOLDER, PLAIN = "tokens", "tokens.bin"  # below the trial's directory
# Megatron's index files: their first bytes, their version, and the code of 32-bit integers.
_MAGIC, _VERSION, _INT32 = b"MMIDIDX\x00\x00", 1, 4


def sequences_of(settings: TrialSettings, steps: int) -> int:
    """Sequences that all replicas train on in `steps` steps."""
    return steps * settings.gradient_accumulation * settings.dp_size * settings.batch_size


def prefixes(settings: TrialSettings, steps: int, trial_dir: Path) -> list[str]:
    """Megatron's names of the datasets, in order."""
    return [str(trial_dir / FOLDER / str(number)) for number in range(sequences_of(settings, steps))]


def write_tokens(settings: TrialSettings, steps: int, kind: TokenFormat, trial_dir: Path) -> dict[str, object]:
    """Write the tokens of a trial; returns their origin, as the engine's own trials record it.

    Ranks of one host may write at the same time: each file is replaced by an equal one. Raises ValueError for data that
    cannot be read.
    """
    store, length, folder = open_tokens(settings.data), settings.seq_len, trial_dir / FOLDER
    count = sequences_of(settings, steps)
    if kind == "plain":
        write_atomic(folder / PLAIN, store.numbers(0, count * length + 1).astype("<i4").tobytes())
    for number in range(count if kind == "megatron" else 0):
        tokens = store.numbers(number * length, length + 1).astype("<i4")
        write_atomic(folder / f"{number}.bin", tokens.tobytes())
        write_atomic(folder / f"{number}.idx", _index(len(tokens)))
    return store.describe()


def _index(tokens: int) -> bytes:
    """Megatron's index of a dataset with one document of one sequence."""
    header = _MAGIC + struct.pack("<QBQQ", _VERSION, _INT32, 1, 2)
    lengths, offsets, documents = struct.pack("<i", tokens), struct.pack("<q", 0), struct.pack("<qq", 0, 1)
    return header + lengths + offsets + documents

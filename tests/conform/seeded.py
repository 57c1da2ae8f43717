"""Right implementations that `burst conform` finds right, and the faults that are seeded in them.

`target(KIND, FAULT)` gives the contents of a target file; "" is no fault. `faults(KIND)` finds the names in the source.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.conform.chain import Chain
from tests.conform.ring import Ring

_BOTH = ("documents", "grouped_heads", "few_kv_heads", "value_dim", "odd_lengths", "short", "batch", "bf16", "fp64")
CLAIMS = {
    "attention": (
        *("causal", "full", "window", "sinks", "softcap", "scale", *_BOTH),
        *("deterministic", "frozen", "two_models", "bytes"),
    ),
    "recurrence": ("gated_delta_net", "mamba2", *_BOTH, "deterministic", "frozen", "two_models", "bytes"),
    "training": (
        *("causal", "documents", "window", "grouped_heads", "few_kv_heads", "odd_lengths", "short", "batch", "fp64"),
        *("padding_right", "padding_left", "evaluation", "accumulation", "checkpointing", "tied", "frozen"),
        *("two_models", "deterministic"),
    ),
}
FUNCTIONS = {
    "attention": ("shard", "attention", "gather", "sent_bytes"),
    "recurrence": ("shard", "recurrence", "gather", "sent_bytes"),
    "training": ("make_model", "shard_batch", "step", "gather_gradients", "evaluate"),
}


def target(kind: str, fault: str = "", ranks: Sequence[int] = (2, 4)) -> dict[str, Any]:
    """What a target file defines."""
    one = Chain(fault) if kind == "recurrence" else Ring(fault)
    names = {"shard_batch": "shard", "gather_gradients": "gather"}
    functions = {names.get(name, name): getattr(one, name) for name in FUNCTIONS[kind]}
    return {"NAME": fault or "ring", "VERSION": "1", "RANKS": tuple(ranks), "CAPABILITIES": CLAIMS[kind]} | functions


def faults(kind: str) -> list[str]:
    """Those seeded, in order: of recurrences in the file of `Chain`; of training in that of `Ring` between its heading
    and the autograd function, of attention in the rest."""
    here = Path(__file__).parent
    before, rest = (here / "ring.py").read_text(encoding="utf-8").split("    # Training\n")
    training, after = rest.split("\nclass _Ring", 1)
    chain = (here / "chain.py").read_text(encoding="utf-8")
    text = {"attention": before + after, "recurrence": chain, "training": training}[kind]
    return list(dict.fromkeys(re.findall(r'\.has\("([^"]+)"\)', text)))

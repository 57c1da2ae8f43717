"""One value of one setting out of YAML: of the right type and in range, or one sentence with file and line."""

from __future__ import annotations

import dataclasses
import os
import typing
from pathlib import Path
from typing import Annotated, Any

from cluster.files.errors import shown_value
from cluster.files.reader import MAX_LEVELS, Node, build, convert, parse_yaml
from engine.lora import Lora
from engine.reader import Meta
from engine.settings import Checkpoint, TrialSettings
from engine.shape import ModelShape
from harness.base.errors import UsageError
from harness.base.lengths import Tokens, read_length
from harness.spec.methods import method_named
from harness.spec.models import read_model


def leaf_types(cls: type[Any], prefix: str = "") -> dict[str, Any]:
    """Type of every setting below a dataclass, by dotted key: `seq_len`, `model.layers`, `checkpoint.tail`."""
    leaves: dict[str, Any] = {}
    for name, annotation in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(annotation):
            leaves |= leaf_types(typing.cast(type[Any], annotation), f"{prefix}{name}.")
        else:
            leaves[prefix + name] = annotation
    return leaves


# Type of every setting by dotted key; `planned` is said by `checkpoint.plan` and by what a user leaves out.
SETTINGS = {key: kind for key, kind in leaf_types(TrialSettings).items() if key != "planned"}
# What users write in a form of its own.
_WRITTEN: dict[str, Any] = {
    "seq_len": Tokens,
    **dict.fromkeys(("memory", "host_memory"), Annotated[str, Meta(description="a size with its unit, such as 80GiB")]),
}


def read_setting(node: Node, key: str, folder: Path) -> Any:
    """The value of setting `key`; model files are looked up in `folder`. Raises UsageError."""
    if key == "model":
        return read_model(node, folder)
    if key == "lora":
        return None if node.value is None else build(Lora, node, key)
    if isinstance(node.value, list):
        raise UsageError(f"{node.place}: {key} is a list; a setting takes one value, write a list under sweep.{key}")
    value = convert(read_length(node, key) if key == "seq_len" else node, _WRITTEN.get(key, SETTINGS[key]), key)
    try:
        _check_range(key, value)
    except ValueError as error:
        raise UsageError(f"{node.place}: {error}") from error
    return value


def overriding(text: str, example: str) -> tuple[str, Node]:
    """One `key.path=value` of --set as its first key and a mapping to lay over a document.

    The value is YAML, the path leads through nested mappings; an error shows `example`.
    """
    key_path, equals, value = text.partition("=")
    place = f"--set {text}"
    keys = key_path.strip().split(".")
    if not equals or not all(keys):
        raise UsageError(f"{place}: this is not path=value; write for example --set {example}")
    if len(keys) > MAX_LEVELS:
        raise UsageError(f"--set {keys[0]}...: its path has {len(keys)} levels; expected at most {MAX_LEVELS}")
    node = parse_yaml(value, place, lambda _line: place)
    for key in reversed(keys):
        node = Node({key: node}, place)
    return keys[0], node


_SAMPLE_MODEL = ModelShape(name="sample", layers=1, hidden=2, ffn=2, heads=1, kv_heads=1, head_dim=2, vocab=1)
_SAMPLE = TrialSettings(task="train", method="burst", model=_SAMPLE_MODEL, seq_len=1)
_BUILT_IN = _SAMPLE.data


def _check_range(key: str, value: Any) -> None:
    """Raise ValueError when the setting cannot have this value, whatever the others are.

    The settings classes judge: one harmless sample of them takes the value. A model's fields depend on each other
    (heads on kv_heads), so they are judged when a trial puts them together.
    """
    if key == "method":
        method_named(value)
    elif key == "mask":
        from engine.attention.masks import parse_mask  # needs numpy, which would slow the start of every command

        parse_mask(value)
    elif key == "data" and value != _BUILT_IN:
        _check_data(value)
    elif key.startswith("checkpoint."):
        dataclasses.replace(Checkpoint(), **{key.removeprefix("checkpoint."): value})
    elif "." not in key:
        dataclasses.replace(_SAMPLE, **{key: value})


def _check_data(value: str) -> None:
    """Raise ValueError for data that is neither a text nor a token store."""
    from engine.data.sources import text_unsupported_reason  # brings numpy, which planning does without
    from engine.data.store import HEADER_FILE, is_store

    if is_store(Path(value)):
        return
    if os.path.isdir(value):
        raise ValueError(
            f"data is {shown_value(repr(value))}, a directory that is no token store (no {HEADER_FILE} in it); make a "
            "store with `burst train data TEXT --out DIR` and give its directory"
        )
    if not os.path.isfile(value):
        raise ValueError(
            f"data is {shown_value(repr(value))}, which is no file here; give {_BUILT_IN}, the path of a text file, "
            "or the directory of a token store"
        )
    if unsupported_reason := text_unsupported_reason(value):
        raise ValueError(unsupported_reason)

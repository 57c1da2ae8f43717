"""Models in Hugging Face's layout, in and out: a folder of `config.json` and safetensors shards.

Reading order: `engine.models.architecture` converts a shape to a configuration and back and has the names of tensors,
`shards` holds the files, `export` and `load` are the two directions. Nothing is ever unpickled. Only reading and
writing tensors imports torch: whether a folder fits a model is checked before ranks start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.hf.load import configured_shape as configured_shape
from engine.hf.load import hugging_face_shape as hugging_face_shape
from engine.hf.load import import_hugging_face as import_hugging_face

if TYPE_CHECKING:
    from engine.hf.export import export_hugging_face as export_hugging_face


def __getattr__(name: str) -> Any:
    if name != "export_hugging_face":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from engine.hf.export import export_hugging_face

    return export_hugging_face

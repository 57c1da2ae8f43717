"""Stands for Hugging Face's datasets, which InternEvo imports for streamed data; its random tokens need none of it."""

from __future__ import annotations

from typing import Any


def load_dataset(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("the stand-in for datasets reads nothing; install datasets")

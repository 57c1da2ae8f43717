"""Stands for datasets.distributed."""

from __future__ import annotations

from datasets import load_dataset as split_dataset_by_node

__all__ = ["split_dataset_by_node"]

"""`burst export`: a trained model in Hugging Face's layout."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import cast

from engine.training.files import RUN_FILE, checkpoints_directory
from engine.training.manifest import checkpoint_path, checkpoints, read_manifest, step_of
from harness.base.errors import UsageError, one_of
from harness.base.writable import make_writable

DTYPES = ("fp32", "bf16")


class ExportCommand:
    help = "write the model of a training run as config.json and safetensors, which transformers loads"
    forwards = False

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a training run")
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the exported model")
        parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after step N (default: the newest)")
        parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the exported tensors (default: fp32)")

    def run(self, arguments: argparse.Namespace) -> int:
        checkpoint = chosen_checkpoint(arguments.run, arguments.step)
        make_writable(arguments.out.absolute().parent)
        # torch is loaded for a checkpoint that exists, not for a typing mistake.
        import torch

        from engine.hf import export_hugging_face
        from engine.training.state import whole_parameters

        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
        try:
            seq_len = cast(int, read_manifest(checkpoint).facts["seq_len"])
            shape, parameters = whole_parameters(checkpoint)
            export_hugging_face(parameters, shape, arguments.out, dtype=dtype, max_positions=seq_len)
        except ValueError as error:
            raise UsageError(f"checkpoint {checkpoint.name} cannot be exported: {error}") from error
        print(f"{arguments.out}: {shape.name} after step {step_of(checkpoint)}, {shape.parameters:,} parameters, "
              f"{arguments.dtype}")  # fmt: skip
        return 0


def chosen_checkpoint(run: Path, step: int | None) -> Path:
    """The checkpoint after `step`, or the newest one. Raises UsageError."""
    if not (run / RUN_FILE).is_file():
        raise UsageError(f"{run} is not the directory of a training run; name one that `burst train` left")
    directory = checkpoints_directory(run)
    found = checkpoints(directory)
    if not found:
        raise UsageError(f"{run} holds no checkpoint yet; wait for its first one, or lower save.every")
    if step is None:
        return found[0]
    if (path := checkpoint_path(directory, step)) not in found:
        raise UsageError(
            f"{run} holds no checkpoint after step {step}; it holds those after {one_of(map(str, map(step_of, found)))}"
        )
    return path


COMMAND = ExportCommand()

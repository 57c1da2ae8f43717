"""`burst train`: train a model on real data; checkpoints, metrics, and resuming.

`burst train data` builds the token store that a run reads, and `burst train export` writes a trained model in Hugging
Face's layout.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from cluster.files.errors import shown_value
from cluster.files.progress import Progress
from engine.reader import read_json
from engine.training.files import RUN_FILE, checkpoints_directory
from engine.training.manifest import checkpoint_path, checkpoints, read_manifest, step_of
from engine.training.trackers import missing_package
from harness.base.errors import UsageError, one_of
from harness.base.interrupts import interruptible
from harness.base.writable import make_writable
from harness.commands import (
    add_launch_arguments,
    check_launch_arguments,
    command_line,
    leave_at_once,
    machine_and_launcher,
)

if TYPE_CHECKING:
    from engine.shape import ModelShape
    from harness.run.bounds import StopTime
    from harness.training.file import TrainingFile
    from harness.training.run import Start

DTYPES = ("fp32", "bf16")  # of exported tensors


class TrainCommand:
    help = "train a model on real data; Ctrl-C saves first, and --resume continues"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "config", type=Path, metavar="CONFIG.yaml",
            help="training configuration: at least model, seq_len, steps, and data, the store that `burst train data` "
            "wrote; such as examples/train_tiny.yaml",
        )  # fmt: skip
        parser.add_argument(
            "--set", dest="overrides", action="append", default=[], metavar="PATH=VALUE",
            help="replace one value, such as save.every=100; may be repeated",
        )  # fmt: skip
        add_launch_arguments(parser, what="train")
        parser.add_argument(
            "--torchrun", action="store_true", help="torchrun has started this on each host, once per rank"
        )
        parser.add_argument(
            "--out", type=Path, metavar="DIR", help="directory of the run (default: results/runs/<configuration>)"
        )
        parser.add_argument("--resume", action="store_true", help="continue from the newest whole checkpoint in DIR")

    def run(self, arguments: argparse.Namespace) -> int:
        from harness.base.terminal import stderr_console
        from harness.training.progress import TrainingView
        from harness.training.run import interruption, stop_time, train

        _check_options(arguments)
        with contextlib.ExitStack() as closing:
            progress = closing.enter_context(Progress(f"preparing the run of {arguments.config}"))
            with _said_once() if arguments.torchrun else contextlib.nullcontext():
                file = _loaded(arguments)
                view = TrainingView(stderr_console(), file.config.steps, progress)
                start = _start(arguments, file, view.say)
            for note in () if arguments.resume else file.notes:
                view.say(note)
            closing.callback(start.launcher.close)
            stop = stop_time(view.say, file.config.save.grace_seconds)
            with view, _announced(view.say, stop), stop.interrupting() if stop else contextlib.nullcontext():
                try:
                    code = train(file.config, start, view, view.say)
                except KeyboardInterrupt:
                    view.say(interruption(start))
                    code = 1
        if code == 0:
            print(f"Trained: {start.run_dir}")
        if getattr(start.launcher, "stuck", False):
            leave_at_once(code)
        return code


def _start(arguments: argparse.Namespace, file: TrainingFile, say: Callable[[str], None]) -> Start:
    """The launcher and directory of this start; with --torchrun this ends the program on all hosts but the first."""
    from harness.records.provenance import commit
    from harness.training.run import Start

    run_dir = arguments.out or Path("results", "runs", arguments.config.stem)
    if arguments.torchrun:
        from harness.training.torchrun import started_by_torchrun

        return started_by_torchrun(file, run_dir, resume=arguments.resume, again=command_line(arguments))
    machine, launcher = machine_and_launcher(arguments, say)
    return Start(
        machine=machine,
        launcher=launcher,
        run_dir=run_dir,
        resume=arguments.resume,
        commit=commit(),
        again=command_line(arguments),
        over_nodes=launcher.name == "ray",
    )


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """Of the processes of a host that all meet the same error of the user, one says it."""
    try:
        yield
    except UsageError:
        if os.environ.get("LOCAL_RANK", "0") != "0":
            raise SystemExit(2) from None
        raise


def _check_options(arguments: argparse.Namespace) -> None:
    """Raises UsageError for options that contradict each other, and for torchrun's ranks that are not told so."""
    check_launch_arguments(arguments)
    if arguments.torchrun and (arguments.nodes or arguments.ray or arguments.launcher):
        raise UsageError("with --torchrun the ranks run already; leave --nodes, --ray and --launcher out")
    if not arguments.torchrun and "TORCHELASTIC_RUN_ID" in os.environ:
        raise UsageError("torchrun started this process, and burst train would start ranks of its own; add --torchrun")


def _loaded(arguments: argparse.Namespace) -> TrainingFile:
    """The configuration. Raises UsageError, also for a package that it needs and that is not installed."""
    from harness.training.file import load_training

    file = load_training(arguments.config, arguments.overrides)
    tracker = file.config.metrics.tracker
    if tracker != "none" and importlib.util.find_spec(tracker) is None:
        raise UsageError(missing_package(tracker, "is not installed"))
    return file


def _announced(say: Callable[[str], None], stop: StopTime | None) -> contextlib.AbstractContextManager[None]:
    """Within the block the first signal prints the next step. Each signal acts as Ctrl-C; a SIGUSR1 after the first
    signal does not: Slurm's and that of `stop` announce the same end, and the run is being saved."""
    said = False

    def announce(number: int) -> bool:
        nonlocal said
        if said:
            return number != signal.SIGUSR1
        said = True
        why = f" ahead of {stop.option}" if stop is not None and stop.passed else ""
        with contextlib.suppress(OSError):  # the terminal may be what is gone
            say(f"stopping{why}: the step under way is finished and saved; a second Ctrl-C or SIGTERM ends at once")
        return True

    return interruptible(announce)


class DataCommand:
    help = "turn texts and chats into a token store for `data:` of experiments and training configurations"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "sources", nargs="+", metavar="SOURCE",
            help="UTF-8 text files, one document each; with --field JSON Lines, JSON lists, Parquet and Arrow files; "
            "folders of these; or python_docs",
        )  # fmt: skip
        parser.add_argument(
            "--field", metavar="NAME",
            help="field of each record that is a document: its text, or the messages of a chat, of which the answers "
            "are learnt",
        )  # fmt: skip
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the new store")
        parser.add_argument(
            "--tokenizer", default="bytes", metavar="bytes|FILE",
            help="bytes, or a Hugging Face tokenizer.json (default: bytes)",
        )  # fmt: skip
        parser.add_argument(
            "--validation", type=_fraction, default=0.01, metavar="PART",
            help="part of the tokens held out for evaluation, at the end (default: 0.01)",
        )  # fmt: skip
        parser.add_argument(
            "--replace", action="store_true", help="build anew where a store exists already; that store is moved aside"
        )

    def run(self, arguments: argparse.Namespace) -> int:
        from engine.data.store import build_store
        from engine.data.tokenizers import tokenizer_named
        from harness.spec.models import named_model

        try:
            tokenizer = tokenizer_named(arguments.tokenizer)
        except ValueError as error:
            raise UsageError(str(error)) from error
        _check_place(arguments.out, replace=arguments.replace)
        try:
            with _moved_aside(arguments.out) as moved, Progress(f"writing the tokens of {arguments.out}"):
                header = build_store(arguments.sources, arguments.out, tokenizer, arguments.validation, arguments.field)
        except ValueError as error:
            raise UsageError(str(error)) from error
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENAMETOOLONG):  # said by main
                error.filename = error.filename or str(arguments.out)  # a full disk names no file
                raise
            raise UsageError(f"{error.filename} cannot be accessed ({error.strerror}); choose another path") from error
        if moved:
            print(f"the earlier store is now {moved}")
        texts = "1 document" if header.documents == 1 else f"{header.documents:,} documents"
        learnt = ", answers of chats alone are learnt" if header.answers_only else ""
        print(
            f"{arguments.out}: {header.count:,} tokens of {texts}, {header.validation:,} of them held out; "
            f"tokenizer {header.tokenizer}, vocabulary {header.vocabulary:,}, {header.dtype}{learnt}"
        )
        wanted = shown_value(f"data: {arguments.out.absolute()}")
        packed = "mask: documents, " if arguments.field else ""
        fits = named_model("tiny").vocab >= header.vocabulary
        model = "model: tiny" if fits else f"a model with a vocab of at least {header.vocabulary}"
        others = f"{packed}{model}, seq_len: 512 and steps: 300"
        print(f"Next: burst train CONFIG.yaml, with {wanted}, {others} in that file")
        return 0


def _fraction(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no part from 0 to below 1; give for example 0.01")
    return value


def _check_place(directory: Path, *, replace: bool) -> None:
    """Raises UsageError for a path that holds something else, or a store that is not to be replaced."""
    from engine.data.store import is_store

    make_writable(directory.parent)
    if not os.path.lexists(directory):
        return
    if not is_store(directory):
        raise UsageError(f"{directory} exists and is no token store; give --out a path that does not exist yet")
    if not replace:
        raise UsageError(f"{directory} holds a token store; give --out another path, or --replace to move it aside")


@contextlib.contextmanager
def _moved_aside(directory: Path) -> Iterator[Path | None]:
    """Moves `directory` aside for the block and yields its new path, None where there was none. Undone on an error."""
    from harness.run.directory import free_name

    if not directory.exists():
        yield None
        return
    moved = directory.rename(free_name(directory))
    try:
        yield moved
    except BaseException:
        moved.rename(directory)
        raise


class ExportCommand:
    help = "write the model of a training run for transformers, or its adapters for peft"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("run", type=Path, metavar="RUN", help="the directory of a training run")
        parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="directory of the exported model")
        parser.add_argument("--step", type=int, metavar="N", help="the checkpoint after step N (default: the newest)")
        parser.add_argument("--dtype", choices=DTYPES, default="fp32", help="of the exported tensors (default: fp32)")

    def run(self, arguments: argparse.Namespace) -> int:
        checkpoint = chosen_checkpoint(arguments.run, arguments.step)
        make_writable(arguments.out.absolute().parent)
        with Progress(f"preparing the export of {arguments.run}") as progress:
            # torch is loaded for a checkpoint that exists, not for a typing mistake. It takes seconds, in which a run
            # that goes on may have removed that checkpoint: the newest one is chosen afterwards.
            importlib.import_module("engine.training.state")
            if arguments.step is None:
                checkpoint = chosen_checkpoint(arguments.run, None)
            while True:
                progress.stage(f"exporting {checkpoint}")
                try:
                    written = _exported(arguments, checkpoint)
                    break
                except ValueError as error:
                    if checkpoint.is_dir():
                        raise UsageError(f"checkpoint {checkpoint.name} cannot be exported: {error}") from error
                # The run goes on and has removed it meanwhile; there is a newer one.
                if arguments.step is not None:
                    raise UsageError(
                        f"{checkpoint} was removed by its run while it was exported; leave --step out, or train with a "
                        "larger save.keep"
                    )
                removed, checkpoint = checkpoint, chosen_checkpoint(arguments.run, None)
                progress.say(f"{removed} was removed by its run while it was read; {checkpoint.name} is exported")
        print("\n".join(written))
        return 0


def _exported(arguments: argparse.Namespace, checkpoint: Path) -> list[str]:
    """Export a checkpoint; what was written, in words, and notes. Raises ValueError when it cannot be read."""
    import torch

    from engine.hf import export_adapters, export_hugging_face
    from engine.models.architecture import architecture_named, shape_under
    from engine.training.state import whole_parameters

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[arguments.dtype]
    manifest = read_manifest(checkpoint)
    shape, parameters = whole_parameters(checkpoint)
    config = cast(dict[str, Any], read_json(arguments.run / RUN_FILE))["config"]
    base: str = config.get("init_from", "")
    mask = cast(str, manifest.facts.get("mask", "causal"))
    attends = shape_under(mask, shape)
    notes: list[str] = []
    if manifest.lora is None:
        origin, notes = _origin(base, shape)
        seq_len = cast(int, manifest.facts["seq_len"])
        end_of_text, more = _end_of_text(Path(config["settings"]["data"]), manifest.facts)
        notes += [] if origin else more
        export_hugging_face(
            parameters, attends or shape, arguments.out, dtype=dtype, max_positions=seq_len, origin=origin,
            end_of_text=end_of_text,
        )  # fmt: skip
    else:
        export_adapters(parameters, shape, manifest.lora, arguments.out, base=base, dtype=dtype)
    if attends is None or (manifest.lora is not None and attends != shape):  # adapters have no configuration
        notes.append(
            f"note: the run trained with mask {mask}, and {architecture_named(shape.architecture).class_name} "
            "attends causally; load it into a model that attends as the run did"
        )
    what = shape.name if manifest.lora is None else f"adapters of {shape.name}"
    count = sum(parameter.numel() for parameter in parameters.values())
    written = f"{arguments.out}: {what} after step {step_of(checkpoint)}, {count:,} parameters, {arguments.dtype}"
    return [written, *notes]


def _end_of_text(data: Path, facts: Mapping[str, object]) -> tuple[int | None, list[str]]:
    """The token that ends a text of the run's store; a note where that is gone or has other data than the run had."""
    from engine.data.store import is_store, read_header
    from engine.data.tokenizers import BYTES

    with contextlib.suppress(OSError, ValueError):
        if is_store(data) and (header := read_header(data)).sha256 == facts.get("data of sha256"):
            return header.end_of_text, []
    if facts.get("tokenizer") in (BYTES, None):  # which has no such token
        return None, []
    return None, [
        f"note: {data} does not hold the tokens that the run trained on, so eos_token_id is null; put the store back "
        "and export again, or set it yourself"
    ]


def _origin(base: str, shape: ModelShape) -> tuple[Path | None, list[str]]:
    """The folder `base` where it still holds the model that a run started from; else a note."""
    from engine.hf import GENERATION, LENGTH, configured_shape
    from engine.training.preflight import check_shape

    if not base:
        return None, []
    try:
        check_shape(Path(base), configured_shape(Path(base)), shape)
        return Path(base), []
    except ValueError as error:
        found = str(error).partition(";")[0]
        return None, [
            f"note: {found}, so ids of special tokens, {LENGTH} and {GENERATION} of init_from are not kept; put its "
            "folder back and export again, or set them yourself"
        ]


def chosen_checkpoint(run: Path, step: int | None) -> Path:
    """The checkpoint after `step`, or the newest one. Raises UsageError."""
    if not (run / RUN_FILE).is_file():
        raise UsageError(f"{run} is not the directory of a training run; name one that `burst train` left")
    directory = checkpoints_directory(run)
    found = checkpoints(directory)
    if not found:
        raise UsageError(
            f"{run} holds no checkpoint yet; train on until its first one, with --resume if it ended, or lower "
            "save.every"
        )
    if step is None:
        return found[0]
    if (path := checkpoint_path(directory, step)) not in found:
        raise UsageError(
            f"{run} holds no checkpoint after step {step}; it holds those after {one_of(map(str, map(step_of, found)))}"
        )
    return path


COMMAND = TrainCommand()
VERBS = {"data": DataCommand(), "export": ExportCommand()}

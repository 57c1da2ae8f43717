"""Model shapes: by name, from `experiments/models/`, written inline in an experiment, or a folder with config.json."""

from __future__ import annotations

from pathlib import Path

from cluster.files.reader import Node, build, convert, read_yaml
from engine.hf import configured_shape
from engine.models.architecture import architectures
from engine.shape import ModelShape
from harness.base.errors import UsageError, nearest

MODELS_DIR = Path(__file__).parents[2] / "experiments" / "models"


def read_model(node: Node, experiment_dir: Path) -> ModelShape:
    """The shape a `model:` value means: a name, a mapping, or relative to the experiment's folder the path of a model
    file or of a folder with a `config.json`.

    Raises UsageError.
    """
    if isinstance(node.value, dict):
        shape = build(ModelShape, node, "model", name="inline")
        architecture_known(shape, node.place)
        return shape
    name = convert(node, str, "model")
    if name.endswith((".yaml", ".yml")):
        return load_model(experiment_dir / name, node.place)
    if model_name(name, experiment_dir) not in _known(experiment_dir) and (
        "/" in name or (experiment_dir / name).exists()
    ):
        return configured_model(experiment_dir / name, node.place)
    return named_model(name, experiment_dir, node.place)


def configured_model(folder: Path, place: str) -> ModelShape:
    """The shape that a folder's `config.json` describes, named after the folder. Raises UsageError with the key."""
    if folder.is_file():
        held = (folder.parent / "config.json").is_file()
        remedy = f"did you mean {folder.parent}?" if held else "give one with config.json, or a name"
        raise UsageError(f"{place}: the model {folder} is a file, where a folder is expected; {remedy}")
    if not folder.is_dir():
        raise UsageError(
            f"{place}: the model folder {folder} does not exist; give a name, or a path relative to the YAML file"
        )
    try:
        return configured_shape(folder)
    except ValueError as error:
        raise UsageError(f"{place}: {error}") from error


def architecture_known(shape: ModelShape, place: str) -> None:
    """Raises UsageError for a shape whose architecture has no file in `engine/models`."""
    known = sorted(architectures())
    if shape.architecture not in known:
        raise UsageError(f"{place}: unknown architecture {shape.architecture}; {nearest(shape.architecture, known)}")


def named_model(name: str, experiment_dir: Path = MODELS_DIR, place: str = "") -> ModelShape:
    """The shape with that name, shipped or beside the experiment; `place` is where it was asked for.

    Raises UsageError with the nearest name.
    """
    known = _known(experiment_dir)
    stem = model_name(name, experiment_dir)
    if stem not in known:
        where = f"{place}: " if place else ""
        raise UsageError(f"{where}unknown model {name}; {nearest(name, sorted(known))}")
    return load_model(known[stem], place)


def model_name(name: str, experiment_dir: Path) -> str:
    """The name a model goes by in records: hyphens may stand for the underscores of a file's name (`llama3-8b`)."""
    known = _known(experiment_dir)
    underscored = name.replace("-", "_")
    return underscored if name not in known and underscored in known else name


def _known(experiment_dir: Path) -> dict[str, Path]:
    """Model files by name; those beside the experiment go before shipped ones."""
    return {path.stem: path for folder in (MODELS_DIR, experiment_dir / "models") for path in folder.glob("*.yaml")}


def load_model(path: Path, place: str = "") -> ModelShape:
    """Read one model file strictly; its stem is the model's name. `place` is where the model was asked for.

    `parameters`, when given, is the published count: a shape that does not come to it raises UsageError.
    """
    if place and not path.exists():
        raise UsageError(f"{place}: the model file {path} does not exist; give a path relative to the YAML file")
    root = read_yaml(path, "model file")
    entries = dict(root.mapping("the model file"))
    published = entries.pop("parameters", None)
    shape = build(ModelShape, Node(entries, root.place), name=path.stem)
    architecture_known(shape, root.place)
    if published is not None:
        count = convert(published, int, "parameters")
        if count != shape.parameters:
            raise UsageError(
                f"{published.place}: parameters is {count:,}, but the shape has {shape.parameters:,}; "
                "correct the shape or the count"
            )
    return shape

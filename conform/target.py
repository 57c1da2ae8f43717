"""The contract: what a system offers so that it can be judged. One Python file per system.

A target file defines

    NAME = "my ring"                # in reports
    VERSION = "1.4.2"               # or a function that returns it
    RANKS = (2, 4)                  # numbers of ranks that it is asked to run
    CAPABILITIES = ("causal", ...)  # what it claims to compute, words of CAPABILITIES below
    REQUIRES = ("torchtitan",)      # modules it imports; without one the target says so. May be left out
    INSTALL = "pip install ..."     # what installs them, each at a version with which it ran. May be left out
    DTYPE = "bf16"                  # of cases that ask for no other, where its kernels have no fp32. May be left out
    DEVICES = ("cpu",)              # where the file runs on CPU ranks alone, or on GPUs alone. May be left out
    VARIANTS = ("zigzag", "plain")  # forms of one system, named file:variant. May be left out: see `variant_of`

and then either attention alone:

    def shard(whole, dim, problem): ...          # this rank's tokens of a tensor that is whole on every rank
    def attention(q, k, v, problem): ...         # this rank's output, differentiable in q, k, v and problem.sinks_N
    def gather(part, dim, problem): ...          # `shard` undone, on every rank

or the recurrence of a linear layer alone:

    def shard(whole, dim, problem): ...
    def recurrence(q, k, v, decay, beta, problem): ...  # this rank's output, shaped as v, differentiable in all five
    def gather(part, dim, problem): ...

or a step of training:

    def make_model(problem): ...                 # a model with the weights problem.state, in problem.dtype
    def shard(batch, problem): ...               # this rank's part of a batch that is whole on every rank
    def step(model, parts, problem): ...         # forward and backward of all micro-batches; the loss of the whole step
    def gather(model, problem): ...              # {name in problem.state: gradient of the whole step}, on every rank
    def evaluate(model, part, problem): ...      # the loss of the whole batch, without gradients. May be left out

Attention tensors are [batch, tokens, heads, head_dim]. The target decides which tokens a rank holds, and in which
order: only what `gather` returns is compared. The gradients of the sinks are added up over the ranks.

A recurrence has a state S [head_dim, value_dim] for each of `heads` value heads, which is 0 before a document. q and k
have `kv_heads` key heads, each for consecutive value heads. `decay` is a logarithm, at most 0, and `beta` is between 0
and 1; both are [batch, tokens, heads], in float32 at least. At token t

    mamba2 (arXiv:2405.21060), beta is None:    S_t = exp(decay_t) S_(t-1) + k_t v_t^T          out_t = S_t^T q_t
    gated_delta_net (arXiv:2412.06464):         S' = exp(decay_t) S_(t-1)
                 S_t = S' + beta_t k_t (v_t - S'^T k_t)^T                    out_t = S_t^T q_t / sqrt(head_dim)

where the delta rule first brings q and k to unit length as transformers does: x * rsqrt(sum of x^2 + 1e-6).

A batch is as transformers has it: `input_ids`, `labels`, `position_ids` [B, S], and `attention_mask` [B, S] where rows
are padded. A label is the token itself, or -100 where it has no loss, so it is the target that shifts. The loss of a
step is the mean over all labels of all its micro-batches, the same number on every rank, as a float or a tensor.
Documents are seen in `position_ids`, which begin again with 0; `problem.documents` has their lengths.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

from engine.reader import nearest

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from torch import Tensor

TARGETS = Path(__file__).parent / "targets"
_MODULE = "conform_target_"

Part: TypeAlias = Any  # what `shard` of a target gives, which that target alone reads

# What a target may claim, and what a case may need: where it is not claimed, the case is "not claimed", never "passed".
CAPABILITIES = {
    "causal": "each token sees itself and earlier ones",
    "full": "each token sees all",
    "gated_delta_net": "the recurrence of gated delta nets",
    "mamba2": "the recurrence of Mamba-2",
    "documents": "packed documents, none of which sees another",
    "window": "a token sees so many tokens before itself",
    "sinks": "a logit per head beside the scores, with a gradient",
    "softcap": "scores bounded by softcap * tanh(scores / softcap)",
    "scale": "a factor of the scores other than head_dim ** -0.5",
    "grouped_heads": "fewer KV heads than query heads",
    "few_kv_heads": "fewer KV heads than ranks",
    "value_dim": "V with a head dim other than that of K",
    "odd_lengths": "a number of tokens that the ranks do not divide",
    "short": "fewer tokens than twice the ranks",
    "batch": "several sequences in a batch",
    "bf16": "bfloat16",
    "fp64": "float64",
    "deterministic": "the same bits in each run",
    "padding_right": "rows padded at their end",
    "padding_left": "rows padded at their beginning",
    "evaluation": "a loss without gradients",
    "accumulation": "several micro-batches in a step, of different lengths",
    "checkpointing": "activations computed again in backward",
    "offload": "activations in host memory until backward",
    "autocast": "parameters in float32, products in bfloat16",
    "tied": "one matrix for the embedding and the LM head",
    "frozen": "inputs or parameters without a gradient",
    "two_models": "two models, or two calls, alive at once",
    "bytes": "the target says how many bytes a rank sends: sent_bytes(problem)",
}
DTYPES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}
DEVICES = ("cpu", "cuda")
FUNCTIONS = {  # of each kind of target
    "attention": ("shard", "attention", "gather"),
    "recurrence": ("shard", "recurrence", "gather"),
    "training": ("make_model", "shard", "step", "gather"),
}
_FUNCTION_OF = {"evaluation": "evaluate", "bytes": "sent_bytes"}  # which a target has that claims it
IGNORE = -100  # the label of a token without a loss


@dataclass(frozen=True, slots=True, kw_only=True)
class CaseProblem:
    """What a case asks for. The same on every rank, but for `rank`, `group` and tensors.

    Attributes:
        tokens: of a whole sequence, S.
        batch: sequences, B.
        heads, kv_heads, head_dim: of attention; query heads are a multiple of KV heads. Of a recurrence: value heads,
            key heads, and the head dim of q and k.
        value_dim: head dim of v and the output; None for head_dim.
        recurrence: gated_delta_net or mamba2; empty for attention.
        decay: the largest decay of a token in a recurrence, as -log.
        dtype: fp64, fp32 or bf16.
        device: of the tensors: cpu or cuda.
        mask: causal or full, within each document.
        documents: tokens of each document of a sequence, which sum to `tokens`; () for one document.
        window: earlier tokens that a token sees beside itself (transformers counts one more); None for all.
        sinks: attention has a logit per query head beside the scores.
        softcap: bound of the scores, or None.
        scale: factor of the scores; None for head_dim ** -0.5.
        padding: (left, right) tokens of padding of each row of a batch; () for none.
        unlabelled: tokens at the beginning of a row without a label, as a prompt has none.
        every: of the other tokens each so many-th has no label; 0 for none.
        micro_batches: tokens of each micro-batch of a step; () for one of `tokens`.
        layers, hidden, ffn, vocab: sizes of the model.
        tied, checkpointing, offload, autocast: as in CAPABILITIES.
        frozen: parameters whose names begin so have no gradient.
        rope_theta, norm_eps: of the model.
        seed: of weights and data.
        ranks, rank, group: which share each sequence; the group is the default one.
        sinks_N: the sinks [heads], which require a gradient; the same on every rank. None without.
        state: whole weights of the model by the names of Llama in transformers.
    """

    tokens: int = 48
    batch: int = 1
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 8
    value_dim: int | None = None
    recurrence: str = ""
    decay: float = 0.2
    dtype: str = "fp32"
    device: str = "cpu"
    mask: str = "causal"
    documents: tuple[int, ...] = ()
    window: int | None = None
    sinks: bool = False
    softcap: float | None = None
    scale: float | None = None
    padding: tuple[tuple[int, int], ...] = ()
    unlabelled: int = 0
    every: int = 0
    micro_batches: tuple[int, ...] = ()
    layers: int = 2
    hidden: int = 32
    ffn: int = 48
    vocab: int = 128
    tied: bool = False
    checkpointing: bool = False
    offload: bool = False
    autocast: bool = False
    frozen: tuple[str, ...] = ()
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    seed: int = 0
    ranks: int = 1
    rank: int = 0
    group: dist.ProcessGroup | None = None
    sinks_N: Tensor | None = field(default=None, compare=False)
    state: Mapping[str, Tensor] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.documents and sum(self.documents) != self.tokens:
            raise ValueError(
                f"documents of {sum(self.documents)} tokens in a sequence of {self.tokens}; let them sum to it"
            )
        if self.heads % self.kv_heads:
            raise ValueError(f"{self.heads} query heads and {self.kv_heads} KV heads; take a multiple of the latter")

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype of tensors; of parameters under autocast, too."""
        import torch

        dtype: torch.dtype = getattr(torch, DTYPES[self.dtype])
        return dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTarget:
    """A target file that was read. `kind` is one of FUNCTIONS; `module` has its functions."""

    spec: str  # as the user named it
    name: str
    kind: str
    ranks: tuple[int, ...]
    devices: tuple[str, ...]
    capabilities: frozenset[str]
    module: ModuleType
    dtype: str = "fp32"  # of cases that ask for no other
    missing: tuple[str, ...] = ()  # modules that it requires and that are not installed
    install: str = ""  # the command that installs them

    @property
    def version(self) -> str:
        """The version that runs; asked only where the target can run. Raises ValueError where VERSION raises."""
        found = self.module.VERSION
        try:
            return str(found() if callable(found) else found)
        except Exception as error:
            raise ValueError(f"VERSION of {self.name} raised {type(error).__name__}: {error}; correct it") from error

    def function(self, name: str) -> Callable[..., Any]:
        """A function of the target: one of its kind, or one that its capabilities need."""
        found: Callable[..., Any] = getattr(self.module, name)
        return found


def version_of(package: str = "burst-harness") -> str:
    """The version of an installed package, else "not installed": this one may run from a checkout."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class UnknownVariant(ValueError):
    """A target is named with a variant that it has not."""


def variant_of(module_name: str, variants: Sequence[str]) -> str:
    """The variant that a target file is loaded as, from its `__name__`; the first of `variants` where it is named
    without one. Raises UnknownVariant."""
    variant = module_name.partition(":")[2] or variants[0]
    if variant not in variants:
        raise UnknownVariant(f"variant {variant!r} is unknown; choose one of {', '.join(variants)}")
    return variant


def target_names() -> list[str]:
    """Targets that are known by name; of a file with variants each of them, as file:variant."""
    found = []
    for path in sorted(TARGETS.glob("[!_]*.py")):
        variants = getattr(_imported(path, ""), "VARIANTS", ())
        found += [f"{path.stem}:{variant}" for variant in variants] or [path.stem]
    return found


def load(spec: str) -> LoadedTarget:
    """The target of a name, or of a Python file, with `:variant` behind it where it has some. Modules it requires are
    imported by its functions, not here.

    Raises ValueError for what is no target, in a sentence that says what is missing.
    """
    place, _, variant = spec.partition(":")
    path = TARGETS / f"{place}.py"
    if not path.is_file():
        path = Path(place)
        if path.suffix == ".py" and not path.exists():
            raise ValueError(f"there is no file {place}; give the path of a target")
        if path.suffix != ".py" or not path.is_file():
            raise ValueError(f"{spec} is no target and no Python file; {nearest(spec, target_names())}")
    module = _imported(path, variant)
    if variant and not hasattr(module, "VARIANTS"):
        raise ValueError(f"{path} has no VARIANTS, so no {variant!r}; leave out what follows the colon")
    return _target(spec, path, module)


def _imported(path: Path, variant: str) -> ModuleType:
    name = f"{_MODULE}{path.stem}" + (f":{variant}" if variant else "")
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses of the file look for their module
    beside = [] if path.parent == TARGETS else [str(path.resolve().parent)]
    sys.path[:0] = beside  # a file of the user's may import its neighbours; ours have the names of systems
    try:
        found.loader.exec_module(module)
    except UnknownVariant:
        raise
    except (Exception, SystemExit) as error:
        raise ValueError(f"{path} cannot be imported: {type(error).__name__}: {error}; correct the file") from error
    finally:
        for each in beside:
            sys.path.remove(each)
    return module


def _target(spec: str, path: Path, module: ModuleType) -> LoadedTarget:
    if absent := [name for name in ("NAME", "VERSION", "RANKS", "CAPABILITIES") if not hasattr(module, name)]:
        raise ValueError(f"{path} defines no {', '.join(absent)}; a target has them (conform/target.py)")
    kind = next((name for name in ("attention", "recurrence") if hasattr(module, name)), "training")
    functions = FUNCTIONS[kind]
    if absent := [name for name in functions if not callable(getattr(module, name, None))]:
        raise ValueError(f"{path} has no function {', '.join(absent)}; a target of {kind} has {', '.join(functions)}")
    ranks, claims = _listed(path, module, "RANKS", "(2, 4)"), _listed(path, module, "CAPABILITIES", '("causal",)')
    if not ranks or not all(isinstance(count, int) and count > 0 for count in ranks):
        raise ValueError(f"{path} has RANKS {ranks}; give numbers of ranks, such as (2, 4)")
    for claimed in claims:
        if claimed not in CAPABILITIES:
            raise ValueError(
                f"{path} claims {claimed!r}, which is no capability; {nearest(str(claimed), CAPABILITIES)}"
            )
        needed = _FUNCTION_OF.get(claimed)
        if needed is not None and not callable(getattr(module, needed, None)):
            raise ValueError(f"{path} claims {claimed!r} and has no function {needed}; define it, or do not claim it")
    dtype, devices = getattr(module, "DTYPE", "fp32"), _listed(path, module, "DEVICES", '("cpu",)', DEVICES)
    if dtype not in DTYPES:
        raise ValueError(f"{path} has DTYPE {dtype!r}; {nearest(str(dtype), DTYPES)}")
    if not devices or not set(devices) <= set(DEVICES):
        raise ValueError(f"{path} has DEVICES {devices}; choose from {', '.join(DEVICES)}")
    return LoadedTarget(
        spec=spec,
        name=str(module.NAME),
        kind=kind,
        ranks=ranks,
        devices=devices,
        capabilities=frozenset(claims),
        module=module,
        dtype=dtype,
        install=str(getattr(module, "INSTALL", "")),
        missing=tuple(name for name in _listed(path, module, "REQUIRES", '("torch",)', ()) if not _installed(name)),
    )


def _listed(path: Path, module: ModuleType, name: str, example: str, default: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """A tuple that a target file defines. A text or a number in its place is a comma that was forgotten."""
    found = getattr(module, name, default)
    if not isinstance(found, tuple | list | set | frozenset):
        raise ValueError(f"{path} has {name} {found!r}; give a tuple, such as {name} = {example}")
    return tuple(found)


def _installed(module_name: str) -> bool:
    """Whether a module, perhaps one inside a package, can be imported."""
    try:
        return importlib.util.find_spec(module_name) is not None
    except ModuleNotFoundError:  # of the package around it
        return False

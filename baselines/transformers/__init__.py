"""transformers' Llama or Qwen3.5 with Liger-Kernel in a plain loop on one GPU, weights in fp32 under autocast.

What a user writes who wants no trainer: the model with Liger's kernels in it, gradient checkpointing, torch's fused
AdamW, and autocast to bf16. `transformers_bf16` beside it has the weights themselves in bf16, which takes half the
memory for them and rounds each update; `transformers_padded` pads documents in the place of packing them. Liger's
kernels are of GPUs: a CPU rank runs the model without them.

TRL and DeepSpeed train the same Llama: `baselines/programs/train_transformers.py` runs all three, and its `engine` says
under which trainer. The recurrence of Qwen3.5's linear layers is a call of flash-linear-attention where that lies
beside torch, and transformers' own in torch elsewhere; a record's `linear_kernel` says which.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from baselines.called import parse_program, render_program, training_request
from baselines.install.places import InstallPlace
from baselines.upstream import DOCUMENTS, PrintedSteps, Rendered, Upstream, document_lengths

if TYPE_CHECKING:
    from engine.settings import TrialSettings

PROGRAM = "train_transformers.py"
# Of transformers' attention: what torch chooses, cuDNN's first, or FlashAttention-4 where it lies beside torch.
KERNELS = ("auto", "cudnn", "fa4")
_FAMILIES = {"llama": "Llama", "qwen3_5": "Qwen3.5"}


def model_reason(upstream: Upstream, settings: TrialSettings) -> str | None:
    """Why a model of transformers cannot run the trial's kernel, recomputation or model, or None."""
    model, checkpoint = settings.model, settings.checkpoint
    if settings.kernel not in KERNELS:
        return f"{upstream.name} runs kernel {' or '.join(KERNELS)}, found {settings.kernel}; set kernel to one it runs"
    if checkpoint.every not in (0, 1) or (checkpoint.every and checkpoint.tail):
        return (
            f"{upstream.name} recomputes nothing or each layer whole, found checkpoint.every {checkpoint.every} and "
            f"tail {checkpoint.tail:g}; set every to 0, or every to 1 and tail to 0"
        )
    if model.linear == "mamba2":
        return (
            f"{upstream.name} has no kernels of Mamba-2, for which transformers needs mamba_ssm, found model "
            f"{model.name}; choose a model with gated delta nets"
        )
    architectures = ("llama", *upstream.beyond_llama)
    if model.architecture in architectures and _config(settings) is not None:
        return None
    known = " or ".join(_FAMILIES[name] for name in architectures)
    return f"{upstream.name} trains transformers' {known}, and {model.name} is another model; choose a {known}"


def transformers_request(settings: TrialSettings, steps: int, trial_dir: Path) -> dict[str, object]:
    """A training trial for the program, without what only one engine of it reads."""
    return training_request(settings, steps, trial_dir) | {"config": _config(settings)}


def _config(settings: TrialSettings) -> dict[str, object] | None:
    """transformers' configuration of the trial's model; None where it describes another."""
    from engine.models.architecture import config_of

    try:
        config = config_of(settings.model, "float32", settings.seq_len)
    except ValueError:
        return None
    del config["torch_dtype"]  # the program chooses that of the weights
    return config


def transformers_kernel(settings: TrialSettings) -> str:
    """What transformers, or torch's own function, attends with under the trial's `kernel`, for a record."""
    if settings.kernel == "fa4":
        return "fa4"
    if settings.kernel == "cudnn":  # `with_kernel` of programs/train_transformers.py
        return "torch: cudnn, else flash, else efficient, else math"
    return "unknown (torch's scaled_dot_product_attention chooses)"


def initial_weights(settings: TrialSettings) -> dict[str, object]:
    """How the program draws what `burst` draws: the file that does, and of each tensor the parameters there that it
    consists of (`engine.models.architecture.Stored`). Norms start as 1 in both."""
    from engine import initialise
    from engine.models.architecture import architecture_named

    model = settings.model
    sizes = model.parameter_sizes()

    def drawn(name: str) -> dict[str, object]:
        return {"name": name, "rows": sizes[name][0], "std": initialise.std_of(name, model)}

    stored = architecture_named(model.architecture).stored(model)
    tensors = {
        one.name: {"parts": [drawn(part) for part in one.parts], "groups": one.groups, "conv": one.conv}
        for one in stored
        if not one.name.endswith("norm.weight")
    }
    return {"file": initialise.__file__, "tensors": tensors}


class WholeSequences(Upstream):
    """Whole sequences on each rank. `kernel` is that of transformers' attention."""

    honours = ("kernel",)
    fa4_beside_torch = True
    tokens = "plain"
    engine: str  # of the program

    def own_reason(self, settings: TrialSettings) -> str | None:
        if settings.cp_size > 1:
            return f"{self.name} keeps sequences whole, found cp_size {settings.cp_size}; set cp_size to 1"
        return model_reason(self, settings)

    def request(self, settings: TrialSettings, trial_dir: Path) -> dict[str, object]:
        """The trial for the program; adapters add what their engine reads."""
        named = {"engine": self.engine, "initial": initial_weights(settings)}
        return transformers_request(settings, self.steps(settings), trial_dir) | named

    def render(self, settings: TrialSettings, trial_dir: Path, place: InstallPlace) -> Rendered:
        return render_program(PROGRAM, self.request(settings, trial_dir), trial_dir, place)

    def parse(self, output: str) -> PrintedSteps:
        return parse_program(output)

    def kernel(self, settings: TrialSettings, place: InstallPlace, environment: Mapping[str, str]) -> str:
        return transformers_kernel(settings)


class Transformers(WholeSequences):
    """`dtype` is that of the products: bf16 by autocast, or fp32. Packed documents are one row whose positions begin
    again, which FlashAttention attends to in one call with cumulative lengths."""

    name = "transformers_upstream"
    package = "transformers"
    system = "transformers + Liger-Kernel"
    source = "github.com/huggingface/transformers, github.com/linkedin/Liger-Kernel"
    dtypes: tuple[str, ...] = ("bf16", "fp32")
    masks: tuple[str, ...] = ("causal", DOCUMENTS)
    engine = "plain"
    beyond_llama = ("qwen3_5",)
    padded = False  # each document is a row of its own, as long as the longest
    weights: Literal["fp32", "bf16"] = "fp32"  # dtype of the parameters, and so of their gradients and Adam's moments

    def own_reason(self, settings: TrialSettings) -> str | None:
        if settings.world_size > settings.cp_size:
            return f"{self.name} runs on one rank, found world_size {settings.world_size}; set world_size to 1"
        if document_lengths(settings) and any(settings.model.linear_layers) and not self.padded:
            return (
                f"{self.name} keeps packed documents of linear layers apart only with causal-conv1d, found mask "
                f"{settings.mask}; set mask to causal"
            )
        return super().own_reason(settings)

    def request(self, settings: TrialSettings, trial_dir: Path) -> dict[str, object]:
        dtypes = {"weights": self.weights, "products": settings.dtype}
        documents = {"documents": document_lengths(settings), "padded": self.padded}
        return super().request(settings, trial_dir) | dtypes | documents


METHOD = Transformers()

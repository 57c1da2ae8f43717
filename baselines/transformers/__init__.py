"""transformers' Llama with Liger-Kernel in a plain training loop on one GPU, weights in fp32 under autocast.

What a user writes who wants no trainer: the model with Liger's kernels in it, gradient checkpointing, torch's fused
AdamW, and autocast to bf16. `transformers_bf16` beside it has the weights themselves in bf16, which takes half the
memory for them and rounds each update; `transformers_padded` pads documents in the place of packing them. Liger's
kernels are of GPUs: a CPU rank runs the model without them.

TRL and DeepSpeed train the same Llama: `baselines/programs/train_transformers.py` runs all three, and its `engine` says
under which trainer.
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


def llama_reason(upstream: Upstream, settings: TrialSettings) -> str | None:
    """Why a Llama of transformers cannot run the trial's kernel, recomputation or model, or None."""
    model, checkpoint = settings.model, settings.checkpoint
    if settings.kernel not in KERNELS:
        return f"{upstream.name} runs kernel {' or '.join(KERNELS)}, found {settings.kernel}; set kernel to one it runs"
    if checkpoint.every not in (0, 1) or (checkpoint.every and checkpoint.tail):
        return (
            f"{upstream.name} recomputes nothing or each layer whole, found checkpoint.every {checkpoint.every} and "
            f"tail {checkpoint.tail:g}; set every to 0, or every to 1 and tail to 0"
        )
    if not model.gated or model.qk_norm:
        return f"{upstream.name} trains transformers' Llama, and {model.name} is another model; choose a Llama"
    return None


def transformers_kernel(settings: TrialSettings) -> str:
    """What transformers, or torch's own function, attends with under the trial's `kernel`, for a record."""
    if settings.kernel == "fa4":
        return "fa4"
    if settings.kernel == "cudnn":  # `with_kernel` of programs/train_transformers.py
        return "torch: cudnn, else flash, else efficient, else math"
    return "unknown (torch's scaled_dot_product_attention chooses)"


def initial_weights(settings: TrialSettings) -> dict[str, object]:
    """How the program draws what `burst` draws: the file that does, and of each matrix of a Llama its name and standard
    deviation there. Norms start as 1 in both."""
    from engine import initialise
    from engine.models.architecture import architecture_named

    stored = architecture_named("llama").stored(settings.model)
    matrices = {one.name: one.parts[0] for one in stored if not one.name.endswith("norm.weight")}
    drawn = {name: (part, initialise.std_of(part, settings.model)) for name, part in matrices.items()}
    return {"file": initialise.__file__, "matrices": drawn}


class WholeSequences(Upstream):
    """Whole sequences on each rank. `kernel` is that of transformers' attention."""

    honours = ("kernel",)
    tokens = "plain"
    engine: str  # of the program

    def own_reason(self, settings: TrialSettings) -> str | None:
        if settings.cp_size > 1:
            return f"{self.name} keeps sequences whole, found cp_size {settings.cp_size}; set cp_size to 1"
        return llama_reason(self, settings)

    def request(self, settings: TrialSettings, trial_dir: Path) -> dict[str, object]:
        """The trial for the program; adapters add what their engine reads."""
        named = {"engine": self.engine, "initial": initial_weights(settings)}
        return training_request(settings, self.steps(settings), trial_dir) | named

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
    padded = False  # each document is a row of its own, as long as the longest
    weights: Literal["fp32", "bf16"] = "fp32"  # dtype of the parameters, and so of their gradients and Adam's moments

    def own_reason(self, settings: TrialSettings) -> str | None:
        if settings.world_size > settings.cp_size:
            return f"{self.name} runs on one rank, found world_size {settings.world_size}; set world_size to 1"
        return super().own_reason(settings)

    def request(self, settings: TrialSettings, trial_dir: Path) -> dict[str, object]:
        dtypes = {"weights": self.weights, "products": settings.dtype}
        documents = {"documents": document_lengths(settings), "padded": self.padded}
        return super().request(settings, trial_dir) | dtypes | documents


METHOD = Transformers()

"""Why settings of a trial do not go together, or not with its model, whatever the method and the machine.

Each function gives one sentence, or None where nothing is in the way: what was found, and what to set instead.
"""

from __future__ import annotations

from dataclasses import fields

from engine.ops import FLOAT8_MULTIPLE
from engine.settings import DOCUMENTS, MAX_HEAD_DIM, STATES_BLOCK, TrialSettings, share_in_8_bits


def combination_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why settings of a trial do not go together, or not with its model, whatever the method, or None."""
    return (
        packing_unsupported_reason(settings)
        or linear_unsupported_reason(settings)
        or states_unsupported_reason(settings)
        or gradient_offload_unsupported_reason(settings)
        or float8_unsupported_reason(settings)
        or head_groups_unsupported_reason(settings)
        or checkpoint_unsupported_reason(settings)
        or _tiles_unsupported_reason(settings)
    )


def checkpoint_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why values of `checkpoint` that a user gave do not go together, or not with the model's layers, or None."""
    checkpoint, layers, planned = settings.checkpoint, settings.model.layers, settings.planned.split()
    if settings.task != "train" or {"checkpoint.every", "checkpoint.whole_layers"}.intersection(planned):
        return None
    if checkpoint.whole_layers > layers:
        return (
            f"checkpoint.whole_layers is {checkpoint.whole_layers}, and model {settings.model.name} has {layers} "
            f"layers; set it to at most {layers}"
        )
    again = checkpoint.layers_again(layers)
    if checkpoint.host_layers > (most := max(0, layers - again - 1)):
        other = ", or checkpoint.every to 0" if again and checkpoint.host_layers < layers else ""
        return (
            f"checkpoint.host_layers is {checkpoint.host_layers}, and of the {layers - again} layers that are not "
            f"computed again at most {most} can be in host memory, the last one never; set it to at most {most}{other}"
        )
    return None


def _tiles_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why a user asked for more runs of tokens than a rank has tokens, or None."""
    tokens = settings.row_tokens // settings.cp_size * (1 if settings.packs else settings.batch_size)
    planned = settings.planned.split()
    for name in ("mlp_tiles", "projection_tiles", "head_tiles"):
        if name not in planned and (tiles := getattr(settings, name)) > max(1, tokens):
            return f"{name} is {tiles}, and a rank has {tokens} tokens; set it to at most {tokens}"
    return None


def packing_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why documents cannot be packed as asked, whatever the method, or None: without the mask there are no rows."""
    if settings.packs:
        return None
    for each in fields(settings):
        value = getattr(settings, each.name)
        if each.name in ("packing", "longer_documents") and value != each.default:
            return (
                f"{each.name} is {value}, but mask is {settings.mask}, and rows are packed under mask {DOCUMENTS} "
                f"alone; set mask to {DOCUMENTS}, or leave {each.name} out"
            )
    return None


def head_groups_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why attention's backward cannot take a group of heads at a time, whatever the method, or None."""
    if settings.head_groups == 1:
        return None
    model, ranks = settings.model, settings.cp_size * settings.tp_size
    if settings.task != "train":
        return f"head_groups is a setting of task train, found {settings.task}; leave it out"
    if ranks > 1:
        return f"head_groups is for sequences of one rank, and {ranks} ranks share one; set head_groups to 1"
    if settings.lora is not None:
        return "head_groups is for projections without adapters, and lora is set; leave one of the two out"
    if settings.linear_dtype == "float8":  # a scale of all heads' weights would not be that of a group's
        return "head_groups is for products in dtype, and linear_dtype is float8; set head_groups to 1"
    if model.sinks or not model.plain_projection:
        return (
            f"head_groups is for projections as Llama's or Qwen3's without sinks, and those of model {model.name} are "
            "others; set head_groups to 1"
        )
    if settings.head_groups > model.kv_heads:
        return (
            f"head_groups is {settings.head_groups}, and model {model.name} has {model.kv_heads} KV heads; set it to "
            f"at most {model.kv_heads}"
        )
    return None


def float8_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why the layers of a trial's model cannot multiply in float8, whatever the method and GPU, or None."""
    if settings.linear_dtype != "float8":
        return None
    model, takes = settings.model, "linear_dtype float8"
    if settings.task != "train":
        return f"{takes} is for training, found task {settings.task}; set linear_dtype to same"
    if settings.dtype != "bf16":
        return f"{takes} stands beside dtype bf16, found {settings.dtype}; set dtype to bf16, or linear_dtype to same"
    if settings.lora is not None:
        return f"{takes} was made for matrices that are trained, and lora freezes them; leave one of the two out"
    for name, width in {
        "hidden": model.hidden,
        "ffn": model.ffn,
        "heads x head_dim": model.heads * model.head_dim,
        "heads x value_dim": model.heads * model.output_dim,
        "kv_heads x head_dim": model.kv_heads * model.head_dim,
        "q_latent": model.q_latent,
        "kv_latent + rope_dim": model.kv_latent + model.rope_dim,
    }.items():
        if width % FLOAT8_MULTIPLE:
            return (
                f"{takes} takes widths that {FLOAT8_MULTIPLE} divides, and model {model.name} has {name} {width}; set "
                "linear_dtype to same"
            )
    return None


def linear_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why the linear layers of a trial's model cannot be run so, whatever the method, or None."""
    model, alone = settings.model, settings.task == "linear"
    if alone and not any(model.linear_layers):
        return f"task linear runs a linear layer, and model {model.name} has none; choose one such as hybrid_1b"
    if not (alone or settings.task == "train") or not any(model.linear_layers):
        return None
    if alone and settings.layout not in ("auto", "contiguous"):
        return f"layout is {settings.layout}, and ranks of task linear have consecutive tokens; set layout to auto"
    has = f"model {model.name} has linear layers"
    kind, *parts = settings.mask.split(":")
    if kind not in ("causal", DOCUMENTS) or "full" in parts:
        return (
            f"mask is {settings.mask}, and {has}, which are causal and have no window; set mask to causal or documents"
        )
    if any(part.startswith("left-") for part in parts):
        return f"mask is {settings.mask}, and {has}, which have no window; leave out what begins with left-"
    if settings.tp_size > 1:
        return (
            f"tp_size is {settings.tp_size}, and {has}, which tensor parallelism does not split here; set tp_size to 1"
        )
    if settings.lora is not None:
        return f"lora is set, and {has}, whose matrices have no adapters; leave lora out"
    lengths = settings.row_tokens, settings.steps.warmup_seq_len or settings.row_tokens
    tokens, needed = min(lengths) // settings.cp_size, model.linear_conv - 1
    if alone or settings.cp_size == 1 or tokens >= needed:
        return None
    return (
        f"each of {settings.cp_size} ranks holds {tokens} tokens, and {has}, whose convolution takes {needed} of the "
        "rank before; give longer sequences or a smaller cp_size"
    )


def states_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why a trial cannot have its `optimizer_states`, whatever the method, or None."""
    if settings.optimizer_states is None:
        return None
    obstacles = {
        f"task is {settings.task}, which has no optimizer": settings.task != "train",
        "dtype is fp64, which the library's kernel does not know": settings.dtype == "fp64",
        "lora is set, whose adapters have few states": settings.lora is not None,
        f"tp_size is {settings.tp_size}, which divides rows": settings.tp_size > 1,
        f"no matrix of model {settings.model.name} has rows of whole blocks of {STATES_BLOCK} elements":
            not share_in_8_bits(settings.model),
    }  # fmt: skip
    found = next((obstacle for obstacle, there in obstacles.items() if there), None)
    return found and f"optimizer_states is {settings.optimizer_states}, and {found}; leave optimizer_states out"


def gradient_offload_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why gradients cannot go to host memory, whatever the method, or None."""
    if not settings.gradient_offload:
        return None
    planned = "optimizer_offload" in settings.planned.split()
    obstacles = {
        f"task is {settings.task}, which has no optimizer": settings.task != "train",
        "optimizer_offload is false, and they are updated with states in host memory": not (
            settings.optimizer_offload or planned
        ),
        "optimizer_states is 8bit, whose updates are waited for": settings.optimizer_states is not None,
        f"gradient_accumulation is {settings.gradient_accumulation}, which adds to them": (
            settings.gradient_accumulation > 1
        ),
        f"tp_size is {settings.tp_size}, whose ranks add to them": settings.tp_size > 1,
        "sharding is hybrid, whose sums over nodes hold them until backward ends": settings.sharding == "hybrid",
    }
    found = next((obstacle for obstacle, there in obstacles.items() if there), None)
    return found and f"gradient_offload is true, and {found}; leave gradient_offload out"


def head_dim_unsupported_reason(kernel: str, *head_dims: int) -> str | None:
    """Why a kernel for GPUs takes no heads of these dims, or None; kernels that are not in `MAX_HEAD_DIM` take any."""
    widest = MAX_HEAD_DIM.get(kernel)
    for dim in head_dims:
        if widest is not None and (dim > widest or dim % 8):
            return (
                f"kernel {kernel} takes head dims up to {widest} in multiples of 8, found {dim}; choose kernel "
                "reference"
            )
    return None


def vocabulary_unsupported_reason(settings: TrialSettings, needed: int) -> str | None:
    """Why the model cannot be trained on tokens whose ids go up to `needed` - 1, or None."""
    if settings.task != "train" or settings.model.vocab >= needed:
        return None
    return (
        f"model {settings.model.name} has a vocabulary of {settings.model.vocab}, but the tokens of {settings.data} "
        f"need {needed}; choose a model with at least that many"
    )

"""NeMo Automodel's contract of context parallelism (`ContextParallelSharder`) for models of transformers: `attach`.

A recipe of NeMo asks the model how a batch is cut, by `prepare_model_inputs_for_cp`. `attach` gives the model that
method and this package's attention. NeMo's labels are shifted already: the label of a token is the next token.

Shape letters: B batch, S whole sequence, L this rank's tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from burst.transformers import register
from engine.attention.context import ContextParallel
from engine.lm_head.loss_kernel import IGNORE

try:
    from nemo_automodel.components.distributed.context_parallel.sharder import ContextParallelSharder, ShardLayout
except ImportError as error:
    raise ImportError(f"burst.nemo needs NeMo Automodel 0.7 (nemo-automodel): {error}") from error

# What each tensor of a batch has where padding is added; `position_ids` are counted on.
_PADDING = {"labels": IGNORE, "loss_mask": 0, "padding_mask": True}


def attach(model: nn.Module, cp: ContextParallel) -> None:
    """Let a model of transformers, in a recipe of NeMo Automodel, attend over the sequence that `cp`'s ranks share.

        model = NeMoAutoModelForCausalLM.from_pretrained(...)
        burst.nemo.attach(model, burst.ContextParallel(device_mesh["cp"]))

    Raises ValueError for a model that is none of transformers, among them NeMo's own with a `backend` of attention.
    """
    if not hasattr(model, "set_attn_implementation") or getattr(getattr(model, "backend", None), "attn", None):
        raise ValueError(
            f"{type(model).__name__} has attention of its own; attach takes models whose attention is that of "
            "transformers (attn_implementation)"
        )
    register(cp)
    model.set_attn_implementation("burst")
    model.prepare_model_inputs_for_cp = lambda batch, num_chunks=1: {"cp_sharder": sharder(cp)}


def sharder(cp: ContextParallel) -> ContextParallelSharder:
    """NeMo's description of how `cp` cuts a batch; one for each batch, because it keeps the batch's lengths. What it
    cuts are `input_ids` or `inputs_embeds`, `labels`, `position_ids`, `loss_mask` and `padding_mask`."""

    def shard_batch(
        cp_mesh: DeviceMesh | None,
        tp_mesh: DeviceMesh | None,
        batch: dict[str, Any],
        *,
        loss_mask: Tensor | None = None,
        padding_token_id: int = 0,
    ) -> tuple[Callable[[], contextlib.AbstractContextManager[None]], dict[str, Any], ShardLayout]:
        _check_ranks(cp_mesh, cp)
        cut, layout = _cut(batch, cp, loss_mask, padding_token_id)
        batch.clear()
        batch.update(cut)
        return contextlib.nullcontext, batch, layout

    def local_token_global_indices(
        cp_mesh: DeviceMesh | None, padded_seq_len: int, device: torch.device | None = None
    ) -> Tensor:
        _check_ranks(cp_mesh, cp)
        return cp.positions(padded_seq_len, device)

    return ContextParallelSharder(shard_batch=shard_batch, local_token_global_indices=local_token_global_indices)


def _check_ranks(cp_mesh: DeviceMesh | None, cp: ContextParallel) -> None:
    size = 1 if cp_mesh is None else cp_mesh.size()
    if size != cp.size or (cp_mesh is not None and size > 1 and cp_mesh.get_local_rank() != cp.rank):
        raise ValueError(
            f"NeMo's mesh has {size} ranks in a sequence and the ContextParallel {cp.size}; make that of the mesh's cp"
        )


def _cut(
    batch: dict[str, Any], cp: ContextParallel, loss_mask: Tensor | None, padding_token_id: int
) -> tuple[dict[str, Any], ShardLayout]:
    """This rank's part of a batch, padded at its end, and its lengths."""
    primary = [name for name in ("input_ids", "inputs_embeds") if batch.get(name) is not None]
    if len(primary) != 1:
        raise ValueError(
            f"the batch has {' and '.join(primary) or 'no input_ids'}; give one of input_ids, inputs_embeds"
        )
    rows, seq_len = batch[primary[0]].shape[:2]
    given = {name: value for name, value in batch.items() if name != "attention_mask" and value is not None}
    if loss_mask is not None:
        given["loss_mask"] = loss_mask
    of_tokens = {name for name, value in given.items() if isinstance(value, Tensor) and value.ndim > 1}
    if unknown := sorted(of_tokens - {primary[0], "position_ids", *_PADDING}):
        raise ValueError(
            f"the batch has {', '.join(unknown)}, which is not known how to cut; documents are given by position_ids "
            "that begin again with 0"
        )
    device = batch[primary[0]].device
    positions = given.get("position_ids", torch.arange(seq_len, device=device)[None])
    if positions.shape not in ((1, seq_len), (rows, seq_len)):
        raise ValueError(f"position_ids are {list(positions.shape)}; only [batch, tokens] of whole sequences are cut")
    positions_BS = positions.expand(rows, seq_len)
    if (mask := batch.get("attention_mask")) is not None:
        padding_BS = _padding(mask, positions_BS)
        given.setdefault("padding_mask", padding_BS)
        positions_BS = torch.where(padding_BS, padding_BS.cumsum(dim=1) - 1, positions_BS)  # a document of its own
    added = -seq_len % cp.layout.chunks(cp.size) if cp.size > 1 else 0
    after_S = torch.arange(added, device=device).expand(rows, added)
    cut = {name: value for name, value in given.items() if name not in of_tokens}
    cut["position_ids"] = cp.shard(torch.cat((positions_BS, after_S), dim=1))
    for name in of_tokens - {"position_ids"} | ({"padding_mask"} & given.keys()):
        whole: Tensor = given[name]
        fill = _PADDING.get(name, padding_token_id if name == "input_ids" else 0)
        end = whole.new_full((whole.shape[0], added, *whole.shape[2:]), fill)
        cut[name] = cp.shard(torch.cat((whole, end), dim=1))
    return cut, ShardLayout(original_seq_len=seq_len, padded_seq_len=seq_len + added)


def _padding(mask: Tensor, positions_BS: Tensor) -> Tensor:
    """Which tokens are padding, [B, S], by an attention mask that numbers documents or has 1 for all tokens, and 0 for
    padding. Raises ValueError for another, and where positions say otherwise."""
    if mask.ndim != 2 or mask.shape != positions_BS.shape:
        raise ValueError(
            f"attention_mask is {list(mask.shape)}; give one of [batch, tokens], or none: documents are given by "
            "position_ids that begin again with 0"
        )
    padding_BS = mask == 0
    if bool((padding_BS[:, :-1] & ~padding_BS[:, 1:]).any()):
        raise ValueError("attention_mask has padding before a token; pad on the right")
    begins_BS = (mask[:, 1:] != mask[:, :-1]) & ~padding_BS[:, 1:]
    if bool((begins_BS & (positions_BS[:, 1:] != 0)).any()):
        raise ValueError(
            "attention_mask numbers documents and position_ids do not begin again with 0 at each; give such positions"
        )
    return padding_BS

"""A batch of whole sequences becomes this rank's part: tokens, next-token labels, positions, documents.

Labels are shifted before the sequence is cut, because the next token of a shard's last one is on another rank. Shape
letters: B batch, S whole sequence, L this rank's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.lm_head.loss_kernel import IGNORE

_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids")


def shard_batch(batch: Mapping[str, Tensor], cp: ContextParallel, *, pad_token_id: int = 0) -> dict[str, Tensor]:
    """This rank's part of a batch that is whole, and the same, on every rank. Padded at its end to what `cp` can split.

    Args:
        batch: `input_ids` [B, S], and, where there are any, `labels` [B, S] as transformers has them: the label of a
            token is the token itself, and -100 has no loss. So have the first tokens of packed documents, or the token
            before learns to foretell another document: collators of packed rows set them. `attention_mask` [B, S] of 1
            and 0; and `position_ids` [B, S], which begin again with 0 at each document of a packed row.
        cp: the ranks that share each sequence.
        pad_token_id: the token of padding.

    Returns:
        `input_ids` [B, L]; `position_ids` [B, L], counted over the whole sequence; `labels` and `shift_labels` [B, L],
        both the label of the token after each, so that no model shifts them again; and `num_items_in_batch`, the
        labels that count in the whole batch. A model of transformers then returns this rank's part of the loss: the
        sum over ranks is the mean over the batch. Padding is a document of its own, so no token attends to it.

    Raises ValueError for a key it does not know, for shapes that differ, and for padding on the left or in the middle.
    """
    if unknown := sorted(set(batch) - set(_KNOWN)):
        raise ValueError(f"the batch has {', '.join(unknown)}, which is not known how to cut; pass {', '.join(_KNOWN)}")
    if "input_ids" not in batch:
        raise ValueError(f"the batch has {', '.join(batch) or 'nothing'} and no input_ids; pass whole sequences")
    tokens_BS = batch["input_ids"]
    for name, tensor in batch.items():
        if tensor.shape != tokens_BS.shape or tensor.ndim != 2:
            raise ValueError(
                f"{name} is {list(tensor.shape)} and input_ids {list(tokens_BS.shape)}; both have to be [batch, tokens]"
            )
    seq_len = tokens_BS.shape[1]
    labels_BS = batch.get("labels", torch.full_like(tokens_BS, IGNORE))
    positions_BS = batch.get("position_ids", torch.arange(seq_len, device=tokens_BS.device).expand_as(tokens_BS))
    if "attention_mask" in batch:
        lengths_B = _real_tokens(batch["attention_mask"])
        padding_BS = torch.arange(seq_len, device=tokens_BS.device) >= lengths_B[:, None]
        labels_BS = labels_BS.masked_fill(padding_BS, IGNORE)
    next_BS = torch.nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE)
    added = -seq_len % cp.layout.chunks(cp.size) if cp.size > 1 else 0
    if added:
        tokens_BS = torch.nn.functional.pad(tokens_BS, (0, added), value=pad_token_id)
        next_BS = torch.nn.functional.pad(next_BS, (0, added), value=IGNORE)
        after_S = torch.arange(added, device=tokens_BS.device).expand(tokens_BS.shape[0], added)
        positions_BS = torch.cat((positions_BS, after_S), dim=1)
    return {
        "input_ids": cp.shard(tokens_BS),
        "position_ids": cp.shard(positions_BS),
        "labels": (shifted_BL := cp.shard(next_BS)),
        "shift_labels": shifted_BL,
        "num_items_in_batch": (next_BS != IGNORE).sum(),
    }


def _real_tokens(mask_BS: Tensor) -> Tensor:
    """Tokens of each row before its padding. Raises ValueError unless padding is at the end."""
    real_BS = mask_BS.bool()
    lengths_B = real_BS.sum(dim=1)
    if not bool((real_BS == (torch.arange(mask_BS.shape[1], device=mask_BS.device) < lengths_B[:, None])).all()):
        raise ValueError("attention_mask has padding before a token; pad on the right (padding_side='right')")
    return lengths_B

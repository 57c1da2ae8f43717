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

CHECKSUM = "batch_checksum"
SHIFTED = "burst_shifted"  # attribute of labels that are those of next tokens: by it they are known in a model's call
_KNOWN = ("input_ids", "labels", "attention_mask", "position_ids")


def shard_batch(batch: Mapping[str, Tensor], cp: ContextParallel, *, pad_token_id: int = 0) -> dict[str, Tensor]:
    """This rank's part of a batch that is whole, and the same, on every rank. Padded at its end to what `cp` can split.

    Args:
        batch: `input_ids` [B, S], and, where there are any, `labels` [B, S] as transformers has them: the label of a
            token is the token itself, and -100 has no loss. So have the first tokens of packed documents, or the token
            before would learn to foretell another document: collators of packed rows set them. `attention_mask` [B, S]
            of 1 and 0; and `position_ids` [B, S], which begin again with 0 at each document of a packed row.
        cp: the ranks that share each sequence.
        pad_token_id: the token of padding.

    Returns:
        `input_ids` [B, L]; `position_ids` [B, L], counted over the whole sequence; `labels` and `shift_labels` [B, L],
        both the label of the token after each, so that no model shifts them again; `num_items_in_batch`, the labels
        that count in the whole batch; and, with several ranks, `batch_checksum` of the whole batch: this package's
        attention compares it between them, and all other attention refuses it. A model of transformers then returns
        this rank's part of the loss: the sum over ranks is the mean over the batch. No token attends to padding under
        causal attention: it is a document of its own before the tokens of a row, which then begin with position 0, or
        comes after them.

    Raises ValueError for a batch that is no mapping, for a key it does not know, for shapes that differ, for padding
    between tokens, and for a first token of a document that has a label.
    """
    if not isinstance(cp, ContextParallel):
        raise ValueError(f"cp is a {type(cp).__name__}; pass a ContextParallel")
    if not isinstance(batch, Mapping):
        raise ValueError(f"the batch is a {type(batch).__name__}; give a dict with input_ids of [batch, tokens]")
    if unknown := sorted(map(str, set(batch) - set(_KNOWN))):
        raise ValueError(f"the batch has {', '.join(unknown)}, which is not known how to cut; pass {', '.join(_KNOWN)}")
    if "input_ids" not in batch:
        raise ValueError(f"the batch has {', '.join(batch) or 'nothing'} and no input_ids; pass whole sequences")
    tokens_BS = batch["input_ids"]
    for name, tensor in batch.items():
        if not isinstance(tensor, Tensor) or (tensor.is_floating_point() and name != "attention_mask"):
            found = str(tensor.dtype) if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise ValueError(f"{name} is {found}; pass a torch tensor of whole numbers, or leave it out")
        if tensor.shape != tokens_BS.shape or tensor.ndim != 2 or not tensor.numel():
            raise ValueError(
                f"{name} is {list(tensor.shape)} and input_ids {list(tokens_BS.shape)}; both have to be [batch, "
                "tokens], with at least one token"
            )
    seq_len = tokens_BS.shape[1]
    labels_BS = batch.get("labels", torch.full_like(tokens_BS, IGNORE))
    count_S = torch.arange(seq_len, device=tokens_BS.device)
    positions_BS = batch.get("position_ids", count_S.expand_as(tokens_BS))
    if "attention_mask" in batch:
        first_B1, end_B1 = _real_tokens(batch["attention_mask"])
        before_BS = count_S < first_B1
        labels_BS = labels_BS.masked_fill(before_BS | (count_S >= end_B1), IGNORE)
        if "position_ids" not in batch:
            positions_BS = count_S - first_B1
        positions_BS = torch.where(before_BS, count_S, positions_BS)
    if bool(((labels_BS[:, 1:] != IGNORE) & (positions_BS[:, 1:] == 0)).any()):
        raise ValueError(
            "the first token after padding, or of a packed document, has a label, which the token before it would have "
            "to foretell; give it the label -100"
        )
    next_BS = torch.nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE)
    added = -seq_len % cp.layout.chunks(cp.size) if cp.size > 1 else 0
    if added:
        tokens_BS = torch.nn.functional.pad(tokens_BS, (0, added), value=pad_token_id)
        next_BS = torch.nn.functional.pad(next_BS, (0, added), value=IGNORE)
        after_S = torch.arange(added, device=tokens_BS.device).expand(tokens_BS.shape[0], added)
        positions_BS = torch.cat((positions_BS, after_S), dim=1)
    shifted_BL = cp.shard(next_BS)
    setattr(shifted_BL, SHIFTED, True)
    part = {
        "input_ids": cp.shard(tokens_BS),
        "position_ids": cp.shard(positions_BS),
        "labels": shifted_BL,
        "shift_labels": shifted_BL,
        "num_items_in_batch": (next_BS != IGNORE).sum(),
    }
    return part if cp.size == 1 else {**part, CHECKSUM: _checksum(torch.cat((tokens_BS, next_BS)))}


def _checksum(numbers: Tensor) -> Tensor:
    """One int64 that depends on each number and its place. Sums that exceed int64 wrap around."""
    return (numbers.flatten() * torch.arange(1, numbers.numel() + 1, device=numbers.device)).sum()


def _real_tokens(mask_BS: Tensor) -> tuple[Tensor, Tensor]:
    """Where the tokens of each row begin and end, [B, 1] each. Raises ValueError for padding between them, and for a
    mask of other numbers, which may number documents or be added to scores."""
    real_BS = mask_BS.bool()
    if bool((mask_BS != real_BS).any()):
        raise ValueError(
            f"attention_mask has values from {mask_BS.min().item()} to {mask_BS.max().item()}; give 1 for tokens and 0 "
            "for padding, and packed documents by position_ids that begin again with 0"
        )
    count_S = torch.arange(mask_BS.shape[1], device=mask_BS.device)
    first_B1 = real_BS.int().argmax(dim=1, keepdim=True)
    end_B1 = first_B1 + real_BS.sum(dim=1, keepdim=True)
    if not bool((real_BS == ((count_S >= first_B1) & (count_S < end_B1))).all()):
        raise ValueError("attention_mask has padding between tokens; move it to the left or the right of each row")
    return first_B1, end_B1

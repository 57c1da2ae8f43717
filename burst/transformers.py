"""Attention of Hugging Face transformers 5 over a sequence that is sharded over ranks: `register`.

transformers looks up attention and its mask by name (`AttentionInterface`, `AttentionMaskInterface`). The functions
here answer to the name `burst`, and to those of flash attention, for models whose attention something sets anew. What
they cannot compute exactly they refuse by name: nothing that a model passes is dropped. All other attention, such as
that of the package `kernels`, refuses what `shard_batch` returns: it would see the tokens of one rank.

Which document a token belongs to is read from `position_ids`, of all ranks together: a document starts where positions
begin again with 0. One gathering of small integers for each batch finds them; all layers share it.

Shape letters: B batch, S whole sequence, L this rank's tokens, N query heads, K KV heads, D head dim; transformers' own
tensors have the heads before the tokens.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import cache, lru_cache, partial, wraps
from inspect import signature
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from burst.batch import CHECKSUM, SHIFTED
from burst.rows import Rows, by_rows, lengths_from, made_by, mask_of_lengths, parts_of
from engine.attention.context import ContextParallel
from engine.attention.prepared import burst_attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k")
FLASH_NAMES = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
# What models pass on to attention and what says nothing about it, or is read here.
_HARMLESS = frozenset(
    (
        "cache_position", "labels", "layer_idx", "max_length_k", "max_length_q", "num_items_in_batch",
        "output_hidden_states", "output_router_logits", "past_key_values", "position_embeddings", "position_ids",
        "return_dict", "shift_labels", "use_cache", CHECKSUM,
    )
)  # fmt: skip
_LAYERS = frozenset(("full_attention", "sliding_attention"))  # that compute from a rank's tokens and exact attention
# Parts of a mask function of transformers, by the name of the function that made them, which attention over sharded
# sequences has. Packed documents found in this rank's positions alone are found again in those of all ranks.
_FULL = "bidirectional_mask_function"
_HAS = frozenset(("causal_mask_function", _FULL, "sliding_window_overlay", "packed_sequence_mask_function"))
_COMPOSED = ("and_masks", "remap_positions_for_packed_sequence", "add_offsets_to_mask_function")


def register(cp: ContextParallel | Callable[[], ContextParallel], *, name: str = "burst") -> None:
    """Let models of transformers attend over the sequence that the ranks of `cp` share.

        burst.register(cp)
        model.set_attn_implementation("burst")      # or from_pretrained(..., attn_implementation="burst")
        loss = model(**burst.shard_batch(batch, cp)).loss

    Args:
        cp: the ranks, and the layout in which each holds its tokens; or a function that gives those of each call, for
            trainers that change them. It replaces the one of an earlier call.
        name: under which models ask for it. The names of flash attention 2, 3 and 4 answer alike from then on.

    Every call raises ValueError, with what was found, for what is not exact: dropout, padding on the left, masks other
    than causal, full, windows and packed documents, positions counted per rank, `cu_seq_lens` that contradict them.
    Raises ImportError without transformers 5.
    """
    if not isinstance(cp, ContextParallel) and not callable(cp):
        raise ValueError(f"cp is a {type(cp).__name__}; pass a ContextParallel, or a function that gives one")
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
    except ImportError as error:
        raise ImportError("register needs transformers 5: pip install 'transformers>=5'") from error
    sharded = lru_cache(maxsize=16)(_ShardedAttention)

    def of_call() -> _ShardedAttention:
        return sharded(cp if isinstance(cp, ContextParallel) else cp())

    # A compiled model breaks its graph here: documents are read on the host, and no tracing makes a mask of them.
    @torch.compiler.disable
    def attend(*args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return of_call().attend(*args, **kwargs)

    @torch.compiler.disable
    def mask(*args: Any, **kwargs: Any) -> Any:
        return of_call().mask(*args, **kwargs)

    for each in (name, *FLASH_NAMES):
        AttentionInterface.register(each, attend)
        AttentionMaskInterface.register(each, mask)
    _guard_other_attention()


@cache
def _guard_other_attention() -> None:
    """Make all attention that is not of this module refuse sharded batches, and so models with other layers and calls
    with a part of such a batch that gives another loss, once in a process."""
    from transformers import AttentionInterface, PreTrainedModel

    replace(AttentionInterface, "get_interface", _get_interface)
    replace(PreTrainedModel, "__call__", _checked_call)


def _checked_call(call: Callable[..., Any]) -> Callable[..., Any]:
    def checked(model: Any, *args: Any, **kwargs: Any) -> Any:
        if CHECKSUM in kwargs:
            refuse_layers(model, router_logits=bool(kwargs.get("output_router_logits")))
        labels = kwargs.get("labels")
        # A copy of the labels has no mark, but the checksum is with it.
        if labels is not None and (hasattr(labels, SHIFTED) or CHECKSUM in kwargs):
            if kwargs.get("shift_labels") is None:
                raise ValueError(
                    "labels are those of shard_batch, shifted before, and the model shifts labels that come without "
                    "shift_labels once more; pass it all that shard_batch returns: model(**part)"
                )
            if CHECKSUM in kwargs and kwargs.get("num_items_in_batch") is None:
                raise ValueError(
                    "labels are those of one rank and come without num_items_in_batch, so that the loss would be the "
                    "mean over this rank's own tokens; pass the model all that shard_batch returns: model(**part)"
                )
        return call(model, *args, **kwargs)

    return checked


def refuse_layers(model: PreTrainedModel, *, router_logits: bool = False) -> None:
    """Raises ValueError for a model of transformers that a rank cannot compute from its own tokens and exact attention
    over all of them. `router_logits`: a call asks for them, as its configuration may."""
    from transformers import PreTrainedModel

    name, config = type(model).__name__, model.config.get_text_config()
    bases: list[Any] = [one for one in type(model).__mro__ if issubclass(one, PreTrainedModel)]
    # transformers looks for attention in the source of a class. That of a user's subclass may have none, or be unknown.
    if not any(one._can_set_attn_implementation() for one in bases if one is not PreTrainedModel):
        raise ValueError(f"{name} has attention of its own, which transformers cannot replace; take another model")
    if pooling := [one.__name__ for one in bases if one.__name__.endswith("ForSequenceClassification")]:
        raise ValueError(
            f"{pooling[0]} takes one token of each sequence, which one rank alone has; take a model that gives each "
            "token a result"
        )
    other = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYERS)
    if other or getattr(model, "_is_stateful", False):
        what = f"layers of type {', '.join(other)}" if other else "layers with a state"
        raise ValueError(f"{name} has {what}, which need tokens of all ranks; take a model of attention alone")
    asked = router_logits or getattr(config, "output_router_logits", False)
    if asked and getattr(config, "router_aux_loss_coef", 1.0):
        raise ValueError(
            "output_router_logits is set, and the loss that balances experts is no sum over tokens; set it to False"
        )
    # A model around another one passes them on; that of Bart passes them to attention alone, and counts its own.
    if not any(_takes_positions(type(each)) for each in model.modules() if isinstance(each, PreTrainedModel)):
        raise ValueError(
            f"{name} takes no position_ids and would count positions from 0 on each rank; take a model that takes them"
        )


def _takes_positions(kind: type) -> bool:
    """Whether a model of this class is given its positions: one of its `forward`s names them, since that of a user's
    subclass may pass on all that it is given."""
    forwards = [vars(one)["forward"] for one in kind.__mro__ if "forward" in vars(one)]
    return any("position_ids" in signature(forward).parameters for forward in forwards)


def _get_interface(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def get_interface(functions: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        found: Callable[..., Any] = earlier(functions, implementation, default)
        ours = getattr(found, "__module__", "") == __name__
        return found if ours else partial(_attend_on_one_rank, found, implementation)

    return get_interface


def _attend_on_one_rank(attend: Callable[..., Any], implementation: str, *args: Any, **kwargs: Any) -> Any:
    """Attention of another function. Raises ValueError for what `shard_batch` returns to one of several ranks."""
    if CHECKSUM in kwargs:
        raise ValueError(sees_one_rank(implementation))
    return attend(*args, **kwargs)


def sees_one_rank(implementation: str) -> str:
    """The sentence about attention that is given a rank's tokens and does not know the others."""
    return (
        f"the model's attention was set to {implementation}, which sees the tokens of one rank; call "
        "set_attn_implementation('burst') on it"
    )


def replace(owner: type | ModuleType, name: str, made: Callable[[Callable], Callable]) -> None:
    """Put `made(earlier)` in the place of a method or property of a class, or of a function of a module.

    Raises ImportError where there is none of that name.
    """
    earlier: Any = getattr(owner, name, None)
    if earlier is None:
        raise ImportError(
            f"{owner.__name__} has no {name}; this adapter knows accelerate 1.15, transformers 5.23, TRL 1.16"
        )
    if isinstance(earlier, property):
        getter: Any = earlier.fget
        setattr(owner, name, property(made(getter)))
    else:
        setattr(owner, name, wraps(earlier)(made(earlier)))


class _ShardedAttention:
    """The two functions that transformers calls, and the positions that they saw last."""

    def __init__(self, cp: ContextParallel) -> None:
        self._cp = cp
        self._seen: list[tuple[weakref.ref[Tensor], int]] = []  # tensors of boundaries, and how often each was written
        self._rows: Rows = ()  # what they say

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        q_offset: int = 0,
        kv_offset: int = 0,
        mask_function: Callable[..., Any] | None = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """What the model hands to `attend` as its mask: nothing, because positions say it all. Called once for each
        kind of layer and forward, collective where there is padding. Raises ValueError for a mask that attention over
        sharded sequences does not have."""
        if q_length != kv_length or q_offset or kv_offset:
            if self._cp.size > 1:
                raise ValueError(_NO_CACHE)
            from transformers.masking_utils import sdpa_mask

            return sdpa_mask(
                batch_size, q_length, kv_length, q_offset, kv_offset, mask_function=mask_function,
                attention_mask=attention_mask, **kwargs,
            )  # fmt: skip
        self._seen = []  # another forward: what numpy, or a collective, wrote to its tensors has no new version
        parts = [] if mask_function is None else [made_by(part) for part in parts_of(mask_function, _COMPOSED)]
        if unknown := [part for part in parts if part not in _HAS]:
            raise ValueError(
                f"the model asks for a mask made of {unknown[0]}, which attention over sharded sequences does not "
                "have; it has causal and full masks, sliding windows and packed documents"
            )
        if attention_mask is not None:
            self._check_padding(attention_mask, causal=_FULL not in parts)
        return None

    def _check_padding(self, real_BL: Tensor, *, causal: bool) -> None:
        """Raises ValueError unless padding is where no token sees it: on the right, under a causal mask."""
        real_BS = self._whole(real_BL.to(torch.int8))
        if bool((real_BS.diff(dim=1) > 0).any()):
            raise ValueError("attention_mask has padding before a token; pad on the right (padding_side='right')")
        if not causal and not bool(real_BS.all()):
            raise ValueError(
                "attention_mask has padding and attention is not causal, so tokens would see it; leave it out"
            )

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Any = None,
        dropout: float = 0.0,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        is_causal: bool | None = None,
        s_aux: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of this rank's queries, [B, N, L, D], over the whole sequence. Returns ([B, L, N, D], None)."""
        if query.shape[2] != key.shape[2]:
            if self._cp.size > 1:
                raise ValueError(_NO_CACHE)
            return _attend_to_cache(
                module, query, key, value, attention_mask, scaling=scaling, sliding_window=sliding_window,
                softcap=softcap, is_causal=is_causal, s_aux=s_aux, **kwargs,
            )  # fmt: skip
        self._refuse(attention_mask, dropout, kwargs)
        query, key, value = (_autocast(each) for each in (query, key, value))
        q_BLND, k_BLKD, v_BLKD = (heads_first.transpose(1, 2) for heads_first in (query, key, value))
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        left = None if sliding_window is None else sliding_window - 1  # a window of W holds the token itself

        def call(rows: slice, lengths: tuple[int, ...]) -> Tensor:
            out_BLND: Tensor = burst_attention(
                q_BLND[rows], k_BLKD[rows], v_BLKD[rows],
                mask=mask_of_lengths(lengths, causal=bool(causal), left=left), cp=self._cp,
                scale=scaling, softcap=softcap, sinks_N=s_aux, tensor_layout="BSHD",
            )  # fmt: skip
            return out_BLND

        return by_rows(call, self._documents(module, kwargs, q_BLND)), None

    @staticmethod
    def _refuse(attention_mask: Any, dropout: float, kwargs: dict[str, Any]) -> None:
        """Raises ValueError for what attention over sharded sequences does not compute."""
        if dropout:
            raise ValueError(
                f"attention has dropout {dropout}; set attention_dropout to 0 in the model's configuration"
            )
        if attention_mask is not None:
            found = list(attention_mask.shape) if isinstance(attention_mask, Tensor) else type(attention_mask).__name__
            raise ValueError(
                f"the model passes a mask of its own ({found}) to its attention; pass no attention_mask to it, or one "
                "of [batch, tokens]"
            )
        for name, passed in kwargs.items():
            if name not in _HARMLESS and name not in BOUNDARIES and passed is not None and passed is not False:
                raise ValueError(
                    f"the model passes {name} to its attention, which attention over sharded sequences does not have; "
                    "leave it out, or take another attn_implementation"
                )

    def _documents(self, module: nn.Module, kwargs: dict[str, Any], q_BLND: Tensor) -> Rows:
        """The documents of the batch. Collective where these positions were not seen before, on all ranks alike: the
        layers of a forward ask with the same tensors."""
        batch, tokens = q_BLND.shape[:2]
        position_ids: Tensor | None = kwargs.get("position_ids")
        if position_ids is None:
            if self._cp.size == 1:
                return ((tokens,),) * batch
            raise ValueError(
                "the model passes no position_ids to its attention; pass those of shard_batch to the model"
            )
        given: list[Tensor] = [
            position_ids,
            *(kwargs[name] for name in BOUNDARIES if isinstance(kwargs.get(name), Tensor)),
        ]
        counted = not any(each.is_inference() for each in given)  # torch counts no writes to tensors of inference mode
        if (
            counted
            and len(given) == len(self._seen)
            and all(
                version == each._version and seen() is each
                for each, (seen, version) in zip(given, self._seen, strict=True)
            )
        ):
            return self._rows
        if position_ids.ndim != 2 or position_ids.shape[1] != tokens or position_ids.shape[0] not in (1, batch):
            raise ValueError(f"position_ids are {list(position_ids.shape)}; give [batch, tokens] of this rank's tokens")
        whole_BS = self._whole_positions(position_ids.detach(), kwargs.get(CHECKSUM)).expand(batch, -1)
        self._refuse_positions_of_a_rank(whole_BS, tokens)
        if self._cp.size > 1:
            _refuse_rotation(module, int(whole_BS.max()) + 1)
        rows = tuple(_lengths(row) for row in whole_BS.tolist())
        check_boundaries(kwargs, [0, *itertools.accumulate(length for row in rows for length in row)])
        self._seen = [(weakref.ref(each), each._version) for each in given] if counted else []
        self._rows = rows
        return rows

    def _whole_positions(self, position_ids_BL: Tensor, checksum: Tensor | None) -> Tensor:
        """All ranks' positions, on the host. A checksum of the whole batch is gathered as one more row. Raises
        ValueError, on all ranks alike, where those of the ranks differ."""
        if checksum is None:
            return self._whole(position_ids_BL).cpu()
        row_1L = checksum.expand(1, position_ids_BL.shape[1])
        whole = self._whole(torch.cat((position_ids_BL, row_1L))).cpu()
        if bool((whole[-1] != whole[-1, 0]).any()):
            raise ValueError(
                f"the {self._cp.size} ranks that share a sequence have different batches; give each of them the same "
                "whole batch before shard_batch cuts it"
            )
        return whole[:-1]

    def _whole(self, tensor_BL: Tensor) -> Tensor:
        """The tensor of all ranks' tokens. Raises ValueError for numbers of tokens that `cp.shard` gives no rank."""
        tokens, size = tensor_BL.shape[1], self._cp.size
        if size > 1 and tokens * size % self._cp.layout.chunks(size):
            raise ValueError(
                f"each of {size} ranks has {tokens} tokens, into which layout {self._cp.layout.name} divides no "
                f"sequence; pass what shard_batch returns. {_GENERATE}"
            )
        return self._cp.unshard(tensor_BL.contiguous(), dim=1)

    def _refuse_positions_of_a_rank(self, whole_BS: Tensor, tokens: int) -> None:
        """Raises ValueError for positions that count each rank's tokens: what a model takes when it is given none. With
        contiguous shards they look like documents of that length."""
        by_rank = whole_BS[:, self._cp.rank_order(tokens, whole_BS.device)].unflatten(1, (self._cp.size, tokens))
        if self._cp.size > 1 and bool((by_rank == torch.arange(tokens)).all()):
            raise ValueError(
                f"position_ids are 0 to {tokens - 1} on all {self._cp.size} ranks, as a model counts them that is "
                f"given none; pass those of shard_batch, which count over the whole sequence. {_GENERATE}"
            )


def _autocast(tensor: Tensor) -> Tensor:
    """What torch's autocast gives its own attention. Rotary embeddings and norms leave Q and K in float32 there, and V
    is of the lower dtype."""
    kind = tensor.device.type
    if tensor.dtype == torch.float64 or not torch.is_autocast_enabled(kind):
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))


def _refuse_rotation(module: nn.Module, positions: int) -> None:
    """Raises ValueError where a rotation depends on the longest position of the batch: each rank would take that of its
    own tokens."""
    config: Any = getattr(module, "config", None)
    rope = getattr(config, "rope_parameters", None) or {}
    for each in (rope, *(inner for inner in rope.values() if isinstance(inner, dict))):
        trained = int(each.get("original_max_position_embeddings") or config.max_position_embeddings)
        if each.get("rope_type") in ("dynamic", "longrope") and positions > trained:
            raise ValueError(
                f"rope_type {each['rope_type']} changes with the longest position beyond {trained}, which here is "
                f"{positions - 1} and differs between ranks; take shorter documents, or a rope_type such as yarn"
            )


_GENERATE = (
    "Before generate, call model.set_attn_implementation('sdpa'), or 'eager' where a model has no sdpa, with the whole "
    "prompt on every rank; set it back after"
)
_NO_CACHE = f"keys of earlier tokens (a cache, as in generate) are not sharded over ranks. {_GENERATE}"


def _attend_to_cache(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **settings: Any
) -> tuple[Tensor, None]:
    """A token of `generate` on one rank: by the attention of transformers itself, with sinks or soft-capping eager."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if settings.get("softcap") is not None or settings.get("s_aux") is not None:
        raise ValueError("generate with soft-capping or sinks: call model.set_attn_implementation('eager') before it")
    attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
    out: tuple[Tensor, None] = attend(module, query, key, value, attention_mask, **settings)
    return out


def _lengths(positions: list[int]) -> tuple[int, ...]:
    """Lengths of the documents of a row. Raises ValueError where positions are not 0, 1, 2, ... in each."""
    starts = [at for at, position in enumerate(positions) if position == 0]
    if not starts or starts[0] != 0:
        raise ValueError(f"the sequence's first position is {positions[0]}; documents start at position 0")
    for at, position in enumerate(positions[1:], 1):
        if position != 0 and position != positions[at - 1] + 1:
            raise ValueError(
                f"position {position} follows {positions[at - 1]} at token {at} of the whole sequence; positions count "
                "up by one and begin again with 0 at each document. Are tokens sharded as the ContextParallel says?"
            )
    return lengths_from(starts, len(positions))


def check_boundaries(given: Mapping[str, object], expected: list[int]) -> None:
    """Raises ValueError where boundaries among the inputs of a model are not those of the positions."""
    for name in BOUNDARIES:
        bounds = cast("Iterable[int] | None", given.get(name))
        if bounds is not None and (found := [int(bound) for bound in bounds]) != expected:
            raise ValueError(
                f"{name} {found[:6]} is not where documents start by position_ids, {expected[:6]}, in the whole "
                f"sequence of {expected[-1]} tokens; pass those of the whole sequence on every rank, or leave them out"
            )

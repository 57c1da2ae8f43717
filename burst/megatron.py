"""Megatron-LM's core attention over the sequence that its context-parallel ranks share: `sharded`.

Megatron builds a layer from a spec, whose slot `core_attention` holds the attention of a layer. `sharded` puts this
package's there, in every self-attention of a spec. Megatron keeps cutting the batch (`get_batch_on_this_cp_rank`) and
its RoPE: rank r has chunks r and 2P-1-r of 2P, which is layout `zigzag` here; of packed sequences it has those chunks
of every document.

What a layer is configured for or passed, and attention here does not compute, is refused when the layer is built or
called. Shape letters: L this rank's tokens, B batch, N query heads, K KV heads, D head dim; Megatron's tensors have the
tokens before the batch.
"""

from __future__ import annotations

import dataclasses
import weakref
from functools import lru_cache
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import ZigzagOfDocuments
from engine.attention.masks import Causal, Documents, Full, Mask, SlidingWindow
from engine.attention.plan import mask_of
from engine.attention.prepared import burst_attention

try:
    from megatron.core.dist_checkpointing.mapping import ShardedStateDict
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.enums import AttnMaskType
    from megatron.core.transformer.module import MegatronModule
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
except ImportError as error:
    raise ImportError("burst.megatron needs Megatron Core: pip install megatron-core") from error

Spec = TypeVar("Spec")

NO_WINDOW = (-1, -1)
# Megatron's own names of attention that this one replaces; any other in the slot computes something else.
_REPLACED = ("DotProductAttention", "TEDotProductAttention")
_SCHEDULES = {None: "auto", "p2p": "auto", "all_gather": "all_gather", "a2a": "ulysses", "a2a+p2p": "usp"}
_NOT_HERE = (
    "fp8_dot_product_attention", "fp8_multi_head_attention", "hybrid_context_parallel", "log_max_attention_logit",
    "qk_clip",
)  # fmt: skip


def sharded(spec: Spec) -> Spec:
    """The spec of a layer, a block or a model with this package's attention in each slot `core_attention`.

        spec = burst.megatron.sharded(get_gpt_layer_local_spec(normalization="RMSNorm"))
        model = GPTModel(config, spec, ...)

    `config.cp_comm_type` chooses the schedule: p2p (Megatron's default) leaves it to `auto`; all_gather, a2a (here
    `ulysses`) and a2a+p2p (`usp`) are those. Raises ValueError for a spec without such a slot, or with one of another
    attention.
    """
    changed = 0

    def replaced(part: Any) -> Any:
        nonlocal changed
        if isinstance(part, (list, tuple)):
            return type(part)(replaced(each) for each in part)
        if not dataclasses.is_dataclass(part) or isinstance(part, type):
            return part
        values = {}
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            if field.name == "core_attention":
                name = getattr(getattr(value, "module", value), "__name__", str(value))
                if name not in (*_REPLACED, BurstCoreAttention.__name__):
                    raise ValueError(
                        f"the spec has {name} as core_attention, which computes something else; sharded replaces "
                        f"{' and '.join(_REPLACED)}"
                    )
                values[field.name], changed = BurstCoreAttention, changed + 1
            else:
                values[field.name] = replaced(value)
        return dataclasses.replace(part, **values)

    result: Spec = replaced(spec)
    if not changed:
        raise ValueError(
            f"the spec ({type(spec).__name__}) has no slot core_attention; pass one of a layer or block with attention"
        )
    return result


class BurstCoreAttention(MegatronModule):
    """What Megatron builds in the slot `core_attention`; arguments and parameters as its own have them."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
    ) -> None:
        super().__init__(config=config)
        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"attention has dropout {dropout}; set attention_dropout to 0.0 in the configuration, or give "
                "--attention-dropout 0"
            )
        if attention_type != "self":
            raise ValueError(
                f"the layer has {attention_type}-attention; only self-attention is sharded over ranks here"
            )
        if found := [name for name in _NOT_HERE if getattr(config, name, False)]:
            raise ValueError(f"the configuration asks for {found[0]}, which attention here does not have; leave it out")
        if cp_comm_type not in _SCHEDULES:
            raise ValueError(f"cp_comm_type is {cp_comm_type!r}; choose {', '.join(filter(None, _SCHEDULES))}")
        self.attn_mask_type = attn_mask_type
        # A scale divided by the number of the layer is multiplied by it again before the softmax.
        self.scale = softmax_scale
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window: tuple[int, int] = tuple(config.window_size) if windowed else NO_WINDOW
        self.schedule = _SCHEDULES[cp_comm_type]
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group, self.cp_group = groups.tp, groups.cp if config.context_parallel_size > 1 else None
        if self.cp_group is not None and self.cp_group.size() != config.context_parallel_size:
            raise ValueError(
                f"context_parallel_size is {config.context_parallel_size} and the group of ranks has "
                f"{self.cp_group.size()}; initialise model parallelism with the same number"
            )
        heads = config.num_attention_heads // groups.tp.size()
        if config.softmax_type == "off-by-one":
            self.register_buffer("softmax_offset", torch.zeros(heads), persistent=False)
        elif config.softmax_type == "learnable":
            device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
            self.softmax_offset = torch.nn.Parameter(torch.empty(heads, device=device, dtype=config.params_dtype))
            if config.perform_initialization:
                config.init_method(self.softmax_offset)
        else:
            self.softmax_offset = None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **others: object,
    ) -> Tensor:
        """Attention of this rank's queries, [L, B, N, D], over the whole sequence: [L, B, N * D]. Packed sequences have
        no batch. Raises ValueError for what it does not compute."""
        if attention_bias is not None or others:
            raise ValueError(f"attention has {', '.join(others) or 'a bias'}, which is not computed here; leave it out")
        cp = ContextParallel.single() if self.cp_group is None else _context(self.cp_group)
        if query.shape[0] != key.shape[0]:
            raise ValueError(
                f"there are {query.shape[0]} queries and {key.shape[0]} keys, as with a cache; build the model without "
                "`sharded` for inference"
            )
        causal = self._is_causal(attn_mask_type)
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if packed:
            documents = _documents(packed_seq_params, causal, attention_mask)
            mask: Mask = self._mask(causal, documents)
            cp = _of_documents(cp, documents)
            q_BLND, k_BLKD, v_BLKD = query[None], key[None], value[None]
        elif packed_seq_params is not None:
            raise ValueError(f"packed_seq_params have format {packed_seq_params.qkv_format}; only thd is computed here")
        else:
            _check_mask(attention_mask, causal, query.shape[0], cp)
            mask = self._mask(causal, None)
            q_BLND, k_BLKD, v_BLKD = (each.transpose(0, 1) for each in (query, key, value))
        out_BLND: Tensor = burst_attention(
            q_BLND, k_BLKD, v_BLKD, mask=mask, cp=cp, scale=self.scale, sinks_N=self.softmax_offset,
            schedule=self.schedule if cp.size > 1 else "auto", deterministic=bool(self.config.deterministic_mode),
            tensor_layout="BSHD",
        )  # fmt: skip
        return out_BLND[0].flatten(1) if packed else out_BLND.transpose(0, 1).flatten(2)

    def _is_causal(self, attn_mask_type: AttnMaskType | None) -> bool:
        kind = self.attn_mask_type if attn_mask_type is None else attn_mask_type
        if kind in (AttnMaskType.causal, AttnMaskType.padding_causal):
            return True
        if kind == AttnMaskType.no_mask:
            return False
        raise ValueError(f"the layer has a mask of type {kind.name}; only causal, padding_causal and no_mask are exact")

    def _mask(self, causal: bool, documents: Documents | None) -> Mask:
        """Megatron's window (left, right), -1 for no limit; a causal layer sees nothing to the right."""
        left, right = self.window
        exact = right <= 0 if causal else (left >= 0 and right >= 0 and documents is None)
        if self.window != NO_WINDOW and not exact:
            raise ValueError(
                f"the layer has window_size {self.window} and is {'causal' if causal else 'not causal'}; only "
                "(left, 0) of causal layers, and (left, right) without packed sequences, are exact"
            )
        if documents is not None:
            return dataclasses.replace(documents, causal=causal, left=left if left >= 0 else None)
        if left >= 0:
            return SlidingWindow(left, 0 if causal else right)
        return Causal() if causal else Full()

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: dict[str, object] | None = None,
    ) -> ShardedStateDict:
        """The learned sinks in Megatron's distributed checkpoints, divided by heads over tensor-parallel ranks."""
        state = self.state_dict(prefix="", keep_vars=True) if self.config.softmax_type == "learnable" else {}
        return make_sharded_tensors_for_checkpoint(
            state, prefix, {"softmax_offset": 0}, sharded_offsets, tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )  # fmt: skip


@lru_cache(maxsize=16)
def _context(group: dist.ProcessGroup) -> ContextParallel:
    """The ranks of a context-parallel group, one value for all layers. Collective at its first call."""
    return ContextParallel(group, layout=ZigzagOfDocuments())


@lru_cache(maxsize=16)
def _of_documents(cp: ContextParallel, documents: Documents) -> ContextParallel:
    return cp.under(documents)


def _documents(packed_seq_params: PackedSeqParams, causal: bool, attention_mask: Tensor | None) -> Documents:
    """The documents of a packed sequence, padding of each included: it stands at its end. Raises ValueError where that
    could be seen, and for what else is not exact."""
    given = packed_seq_params
    padded = given.cu_seqlens_q if given.cu_seqlens_q_padded is None else given.cu_seqlens_q_padded
    keys = given.cu_seqlens_kv if given.cu_seqlens_kv_padded is None else given.cu_seqlens_kv_padded
    if padded is None:
        raise ValueError("packed_seq_params have format thd and no cu_seqlens_q; give the boundaries of the documents")
    documents = mask_of(None, padded, None)
    assert isinstance(documents, Documents), "boundaries make documents"
    if attention_mask is not None:
        raise ValueError("a packed sequence comes with an attention_mask; its boundaries say it all, so pass None")
    if keys is not None and keys is not padded and mask_of(None, keys, None) != documents:
        raise ValueError("cu_seqlens of queries and of keys differ; only self-attention is sharded over ranks here")
    if not causal and padded is not given.cu_seqlens_q and mask_of(None, given.cu_seqlens_q, None) != documents:
        raise ValueError("documents are padded and attention is not causal, so tokens would see padding; do not pad")
    if given.cp_group is not None or given.local_cp_size is not None:
        raise ValueError("packed_seq_params bring a group of ranks of their own; turn hybrid context parallelism off")
    if getattr(given, "tokens_per_sample", None) is not None:
        raise ValueError(
            "documents of a sequence that is cut as a whole (--dataloader-inter-document-masking) are not computed "
            "here; only documents that are cut one by one are"
        )
    return documents


# The mask that was checked last, how often it was written to, and as what it was read.
_checked: list[tuple[weakref.ref[Tensor], int, bool]] = []


def _check_mask(attention_mask: Tensor | None, causal: bool, tokens: int, cp: ContextParallel) -> None:
    """Raises ValueError, on all ranks alike, unless a mask (True hides a key) says what the layer's type says. Compared
    once for each tensor; collective then."""
    if attention_mask is None:
        return
    key = (attention_mask._version, causal)
    if _checked and _checked[0][0]() is attention_mask and _checked[0][1:] == key:
        return
    seq_len = tokens * cp.size
    queries = cp.positions(seq_len, attention_mask.device)[:, None]
    keys = torch.arange(seq_len, device=attention_mask.device)
    hidden = keys > queries if causal else torch.zeros_like(keys > queries)
    fits = attention_mask.ndim == 4 and attention_mask.shape[-2:] == hidden.shape
    differs = (attention_mask.bool() != hidden).any() if fits else torch.ones((), dtype=torch.bool, device=keys.device)
    found = differs.to(torch.int32).reshape(1)
    if cp.group is not None:
        with cp.collective():
            dist.all_reduce(found, op=dist.ReduceOp.MAX, group=cp.group)
    if bool(found):
        raise ValueError(
            f"attention_mask ({list(attention_mask.shape)}) is not the {'causal' if causal else 'empty'} mask of "
            f"{seq_len} tokens, on this rank or another; pass None, and packed documents as packed_seq_params"
        )
    _checked[:] = [(weakref.ref(attention_mask), *key)]

"""torchtitan's attention over the sequence that its context-parallel ranks share: an override of `FlexAttention`.

    --override.imports burst.torchtitan.attention --parallelism.context_parallel_degree 4

torchtitan makes a `BlockMask` of each batch and cuts it, tokens and positions alike (`cp_shard`). What the mask says is
read from the functions that it was made of: documents by asking them about neighbouring tokens, windows by their size,
and this rank's positions from the function that torch puts around them. Masks made of other functions are refused.
The sharding of this module leaves K and V where they are; FlexAttention's gathers them on every rank.

Shape letters: B batch, L this rank's tokens, S whole sequence, N heads, H head dim as in torchtitan (elsewhere D).
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import BlockMask

from burst.rows import Rows, by_rows, lengths_from, made_by, mask_of_lengths, parts_of
from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import LAYOUTS
from engine.attention.prepared import burst_attention

try:
    import spmd_types as spmd
    from spmd_types.runtime import get_local_type, get_partition_spec
    from torchtitan.config import override
    from torchtitan.config.override import derive
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import FlexAttention
    from torchtitan.protocols.module import Module
    from torchtitan.protocols.sharding import LocalMapConfig, ShardingConfig
except ImportError as error:
    raise ImportError(f"burst.torchtitan needs torchtitan 0.3 and what it imports: {error}") from error

_CP_WRAPPER = "_create_cp_block_mask"
_CAUSAL = "get_causal_mask_mod"
_WINDOW = "get_sliding_window_mask_mod"
# torchtitan's functions that divide the sequence, by the name of the function that made them. The second one is one of
# documents only under a causal mask.
_DOCUMENTS = ("get_document_mask_mod", "get_efficient_causal_mask_mod_for_packed_document", "get_fixed_block_mask_mod")


class BurstFlexAttention(Module):
    """In place of torchtitan's FlexAttention; its configuration is one of FlexAttention's, so that torchtitan makes
    masks for it."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        """That of FlexAttention. `kernel_options`, which are for its kernel, are not used."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self._mesh: DeviceMesh | None = None  # of the ranks that share a sequence

    def parallelize(self, parallel_dims: ParallelDims) -> None:
        """torchtitan's own, and the ranks that share a sequence."""
        super().parallelize(parallel_dims)
        self._mesh = parallel_dims.get_optional_mesh("cp")

    @torch.compiler.disable  # masks are read on the host
    def forward(
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: BlockMask,
        score_mod: Callable[..., Tensor] | None = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **others: object,
    ) -> Tensor:
        """Attention of this rank's queries over the whole sequence. Raises ValueError for what is not exact."""
        if score_mod is not None or others:
            raise ValueError(
                f"attention has {', '.join(others) or 'a score_mod'}, which is not computed here; keep "
                "FlexAttention in this layer"
            )
        if not isinstance(attention_masks, BlockMask):
            raise ValueError(f"the mask is a {type(attention_masks).__name__}; only BlockMask is read here")
        said = _said(attention_masks, self._mesh, q_BLNH)
        channels = v_BLNH.shape[-1]
        with spmd.no_typecheck():
            if channels < q_BLNH.shape[-1]:  # of latent attention: zeros add nothing to the other channels
                v_BLNH = torch.nn.functional.pad(v_BLNH, (0, q_BLNH.shape[-1] - channels))

            def call(rows: slice, lengths: tuple[int, ...]) -> Tensor:
                mask = mask_of_lengths(lengths, causal=said.causal, left=said.left)
                found = burst_attention(
                    q_BLNH[rows], k_BLNH[rows], v_BLNH[rows], mask=mask, cp=said.cp, scale=scale,
                    return_lse=out_transform is not None, tensor_layout="BSHD",
                )  # fmt: skip
                if isinstance(found, Tensor):
                    return found[..., :channels]
                assert out_transform is not None, "only it takes the LSE"
                out_BLNH, lse_BNL = found
                return out_transform(out_BLNH[..., :channels], lse_BNL.transpose(1, 2))

            out = by_rows(call, said.rows)
        if spmd.is_type_checking():
            spmd.assert_type(out, get_local_type(q_BLNH), get_partition_spec(q_BLNH))
        return out


@override(
    target=FlexAttention.Config,
    fqns=["*layers.*.attention.inner_attention"],
    exact=True,
    description="attention over a sharded sequence without gathering K and V",
)
def attention(cfg: FlexAttention.Config) -> BurstFlexAttention.Config:
    """The override: `--override.imports burst.torchtitan.attention`."""
    return derive(cfg, BurstFlexAttention.Config, sharding_config=_sharding(cfg.sharding_config))


def _sharding(config: ShardingConfig | None) -> ShardingConfig | None:
    """The sharding of FlexAttention without its gathering: K and V, and their gradients, stay as they come."""
    if config is None:
        return None
    source = config.in_src_shardings or {}
    names = ("q_BLNH", "k_BLNH", "v_BLNH")
    if set(source) != set(names) or (config.in_dst_shardings or source)["q_BLNH"] != source["q_BLNH"]:
        raise ValueError(
            f"FlexAttention is sharded by {', '.join(source) or 'nothing'}, and q perhaps moved; this adapter knows "
            f"{', '.join(names)} of torchtitan 0.3"
        )
    local_map = LocalMapConfig(in_grad_placements=tuple(source[name] for name in names))
    return dataclasses.replace(config, in_dst_shardings=source, local_map=local_map)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """What a mask says."""

    cp: ContextParallel  # the ranks, in the layout that tokens were cut by
    rows: Rows  # lengths of the documents of each row
    causal: bool
    left: int | None  # tokens that a token sees before itself; None for no limit


_known: weakref.WeakKeyDictionary[BlockMask, _Said] = weakref.WeakKeyDictionary()
_contexts: dict[tuple[object, str], ContextParallel] = {}  # by process group and layout


def _said(mask: BlockMask, mesh: DeviceMesh | None, q_BLNH: Tensor) -> _Said:
    """What this mask says, read once for all layers that get it. The host waits for the GPU."""
    if mask not in _known:
        _known[mask] = _read(mask, mesh, q_BLNH)
    return _known[mask]


def _read(mask: BlockMask, mesh: DeviceMesh | None, q_BLNH: Tensor) -> _Said:
    function, size = mask.mask_mod, 1 if mesh is None else mesh.size()
    batch, tokens = q_BLNH.shape[:2]
    cut = made_by(function) == _CP_WRAPPER
    if cut != (size > 1):
        raise ValueError(
            f"{size} ranks share a sequence and its mask is {'cut' if cut else 'whole'}; let torchtitan cut batches "
            "(cp_shard), and call parallelize on the model"
        )
    rows, heads = mask.kv_num_blocks.shape[:2]
    if heads != 1 or rows not in (1, batch):
        raise ValueError(f"the mask is one of {rows} rows and {heads} heads; only masks of all heads are read here")
    cp = ContextParallel.single()
    if mesh is not None and cut:
        inside = inspect.getclosurevars(function).nonlocals
        function = inside["mask_mod"]
        in_order = torch.arange(tokens * size, device=q_BLNH.device)
        by_row = [inside["qkv_idx_restore"](row, in_order) for row in torch.arange(rows, device=q_BLNH.device)]
        cp = _context(mesh, torch.stack(by_row).cpu())
    parts = list(parts_of(function, ("and_masks",)))
    names = [made_by(part) for part in parts]
    causal = _CAUSAL in names or _WINDOW in names
    unknown = [name for name in names if name not in (_CAUSAL, _WINDOW, *_DOCUMENTS)]
    if unknown or (_DOCUMENTS[1] in names and not causal):
        raise ValueError(
            f"the mask is made of {', '.join(names)}; causal masks, windows and documents of torchtitan 0.3 are exact "
            "here, and no others"
        )
    windows = [inspect.getclosurevars(part).nonlocals["window_size"] for part in parts if made_by(part) == _WINDOW]
    dividing = [part for part in parts if made_by(part) in _DOCUMENTS]
    lengths = tuple(_lengths(dividing, row, tokens * size, q_BLNH.device) for row in range(rows))
    return _Said(
        cp=cp, rows=lengths * (batch // rows), causal=causal, left=min(windows) - 1 if windows else None
    )  # fmt: skip


def _context(mesh: DeviceMesh, order_BS: Tensor) -> ContextParallel:
    """The ranks of a mesh in the layout in which they hold these positions, rank 0's first. Collective at first; all
    ranks refuse alike."""
    size, seq_len = mesh.size(), order_BS.shape[1]
    for layout in ("zigzag", "contiguous"):
        if seq_len % LAYOUTS[layout].chunks(size):
            continue
        runs = [run for rank in range(size) for run in LAYOUTS[layout].segments(seq_len, size, rank)]
        if bool((order_BS == torch.cat([torch.arange(run.start, run.start + run.count) for run in runs])).all()):
            key = (mesh.get_group(), layout)
            if key not in _contexts:
                _contexts[key] = ContextParallel(mesh, layout=layout)
            return _contexts[key]
    raise ValueError(
        "tokens are cut neither head to tail nor into consecutive parts; set "
        "--parallelism.context_parallel_load_balancer headtail"
    )


def _lengths(dividing: list[Callable[..., Tensor]], row: int, seq_len: int, device: torch.device) -> tuple[int, ...]:
    """Lengths of the documents of a row: a token that does not see the one before it begins one."""
    of_row = torch.tensor(row, device=device)
    tokens = torch.arange(1, seq_len, device=device)
    begins = torch.zeros(seq_len - 1, dtype=torch.bool, device=device)
    for function in dividing:
        begins |= ~function(of_row, torch.zeros_like(of_row), tokens, tokens - 1)
    starts = [0, *(int(token) for token in tokens[begins].tolist())]
    return lengths_from(starts, seq_len)

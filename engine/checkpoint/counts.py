"""Counts of what backward computes again: layers, FLOPs, forwards of attention, and sums over tiles. No torch.

Checkpointing repeats the matrix multiplications of each layer it recomputes once, except the MLP's last, whose result
no gradient needs; with `checkpoint.every` k those of k - 1 of k such layers once more, or as often as
`checkpoint.replay: bisect` runs them, and attention for the part of the sequence whose outputs are not kept
(`checkpoint.tail`): once, under `bisect` in every run of its layer. A layer that is not recomputed repeats the MLP's
matrices before its last one for the tokens whose products are not kept (`checkpoint.mlp`); tiled projections repeat
queries and keys where these are normed. A layer without an MLP repeats all but the matrix that it ends with.

Of a group of layers only the first one's input is saved, and backward needs the inputs last layer first. `hold` runs
the group once and holds every input. `bisect` runs from the nearest input it has to the one it needs, and saves the
input halfway, the one halfway from there, and so on: the places are those of recursive bisection (Griewank,
Optimization Methods and Software 1, 1992), so that the inputs held at once grow with the logarithm of the group's
layers, and the recomputed layers with layers times logarithm.
"""

from __future__ import annotations

from functools import cache

from engine.attention.geometry.layout import tail_cut
from engine.attention.masks import parse_mask
from engine.attention.masks.mask import FirstRows
from engine.lora import MLP, PROJECTIONS, Lora, adapter_parameters, trained_weights
from engine.settings import BYTES_OF, STATES_BLOCK, Checkpoint, TrialSettings, share_in_8_bits
from engine.shape import ModelShape

# Bytes per parameter that FSDP2 copies in the GPU's own memory around its transfers. Of gathering: the shard cast and
# copied to its place; all shards copied to the parameters. Of reducing: gradients cast and copied in.
_GATHER_OF_SHARD, _GATHER_OF_ALL, _REDUCE_OF_ALL = 4 + 2 + 2 + 2, 2 + 2, 2 + 4


def kept_places(first: int, place: int) -> list[int]:
    """Places between `first` and `place` whose inputs a run from one to the other saves under `bisect`."""
    kept: list[int] = []
    while (first := (first + place + 1) // 2) < place:
        kept.append(first)
    return kept


def layers_recomputed(checkpoint: Checkpoint, layers: int) -> int:
    """Layers that one backward of a model of `layers` runs only for their outputs, the next layers' inputs. Each
    layer's run for its own activations is not counted. `every` is at least 1."""
    groups, rest = divmod(layers, checkpoint.every)
    return groups * _in_group(checkpoint, checkpoint.every) + _in_group(checkpoint, rest)


def inputs_at_once(checkpoint: Checkpoint, layers: int) -> int:
    """The most inputs of one group held at once besides the first one's, the one in use included."""
    others = min(checkpoint.every, layers) - 1
    return others.bit_length() if checkpoint.replay == "bisect" else others


def kept_at_once(checkpoint: Checkpoint, layers: int) -> int:
    """The most of them that `bisect` saves for a later request; the one in use is not among them."""
    return max(0, inputs_at_once(checkpoint, layers) - 1) if checkpoint.replay == "bisect" else 0


def group_starts(checkpoint: Checkpoint, layers: int) -> int:
    """Inputs that a forward saves: those of the groups' first layers. `every` is at least 1."""
    return -(-layers // checkpoint.every)


def inputs_in_store(checkpoint: Checkpoint, layers: int) -> int:
    """The most inputs that one store holds at once: those of the groups' first layers, and those a group adds."""
    return group_starts(checkpoint, layers) + kept_at_once(checkpoint, layers)


def _in_group(checkpoint: Checkpoint, layers: int) -> int:
    others = max(0, layers - 1)
    return _bisected(others) if checkpoint.replay == "bisect" else others


@cache
def _bisected(places: int) -> int:
    """Layers run for `places` places after a saved one: to the place halfway, for those after it, for those before."""
    if places == 0:
        return 0
    half = (places + 1) // 2
    return half + _bisected(places - half) + _bisected(half - 1)


def repeated_products(
    settings: TrialSettings,
    checkpoint: Checkpoint,
    *,
    projection_tiles: int,
    mlp_tiles: int,
    head_groups: int,
    tokens: float,
    rank_tokens: int,
) -> float:
    """FLOPs of repeated matrix multiplications for `tokens` tokens, of which a rank computes `rank_tokens` at once
    (none where there are more ranks than tokens; such a trial is refused). The choices given stand in place of those of
    the settings.

    Tiled projections, and groups of heads, repeat queries and keys where these are normed, since their norm's gradient
    needs its input. What autograd recomputes in tiles is repeated whole, but for a frozen last matrix, and so is the
    MLP's last matrix where a norm comes after it. Frozen matrices are differentiated by autograd, and a product is
    repeated with that of its adapters; the adapters of the MLP's last matrix are repeated where it is not.
    """
    model, lora, plain_mlp = settings.model, settings.lora, settings.plain_mlp
    again, runs = checkpoint.layers_again(model.layers), layers_run_again(model, checkpoint)
    share, last = model.mlp_share, model.mlp_share * model.ffn * model.hidden
    weights = runs * (model.layer_matrices + model.recurrence_products + adapter_parameters(model, lora))
    unformed = plain_mlp or (lora is not None and model.norms == "before")  # the last matrix's product, also in tiles
    if unformed or (model.norms == "before" and mlp_tiles == 1):
        weights -= again * last
    weights -= again * model.bare_outputs
    kept = round(checkpoint.mlp * rank_tokens) / max(1, rank_tokens)
    of_mlp = share * model.mlp_parameters + adapter_parameters(model, lora, MLP)
    weights += (model.layers - again) * (1 - kept) * (of_mlp - (last if unformed else 0))
    if projection_tiles > 1 and not (model.plain_projection and lora is None):
        weights += model.layers * (model.projection_parameters + adapter_parameters(model, lora, PROJECTIONS))
    elif model.qk_norm:
        normed = model.attention_layers if projection_tiles > 1 else 0
        if head_groups > 1 and projection_tiles == 1:
            normed = again - sum(model.linear_layers[:again])
        weights += normed * model.hidden * (model.heads + model.kv_heads) * model.head_dim
    if head_groups > 1 and checkpoint.tail < 1:
        # A layer that attends again forms all queries, keys and values for that: of a held group the last one alone.
        step = checkpoint.every if checkpoint.replay == "hold" else 1
        attending = sum(not model.linear_layers[min(start + step, again) - 1] for start in range(0, again, step or 1))
        weights += attending * model.hidden * (model.heads + 2 * model.kv_heads) * model.head_dim
    return 2.0 * tokens * weights


def layers_run_again(model: ModelShape, checkpoint: Checkpoint) -> int:
    """Runs of a layer's forward in backward: its own recomputation, and those for the next layer's input."""
    again = checkpoint.layers_again(model.layers)
    return again + _for_inputs(checkpoint, again)


def added_weights(model: ModelShape, mlp_tiles: int, projection_tiles: int, lora: Lora | None = None) -> float:
    """Weights whose gradients are sums over tiles, in all layers, each counted once per tile; of one tile there is no
    sum, and frozen weights have no gradients."""
    tiled = (mlp_tiles, MLP), (projection_tiles, PROJECTIONS)
    return model.layers * sum(tiles * trained_weights(model, lora, among) for tiles, among in tiled if tiles > 1)


def group_states(model: ModelShape, head_groups: int) -> float:
    """Elements of one token that a layer's backward in groups of heads reads and writes beyond that of all heads at
    once: for each further group the layer's input, normed and read again; and copies of outputs and gradients from and
    to tensors of all heads."""
    if head_groups == 1:
        return 0.0
    groups = -(-model.kv_heads // heads_at_once(model.kv_heads, head_groups))
    outputs, formed = model.heads * model.output_dim, model.heads * model.head_dim + model.sent_key_dims
    return 3.0 * (groups - 1) * model.hidden + 4 * outputs + 2 * formed


def heads_at_once(kv_heads: int, head_groups: int) -> int:
    """KV heads of a group, where there are at most `head_groups` of equal size."""
    return -(-kv_heads // head_groups)


def repeated_attention(checkpoint: Checkpoint, layers: int, head_share: float) -> float:
    """Forwards of one layer's attention that backward runs, of the part before the tail (`head_share` of a whole one).
    Once a layer, since a group that holds computes for the layers' own recomputation; under `bisect` every run's."""
    again = checkpoint.layers_again(layers)
    return head_share * (again + (_for_inputs(checkpoint, again) if checkpoint.replay == "bisect" else 0))


def layer_pairs(settings: TrialSettings) -> float:
    """Visible pairs of one sequence in a layer, on average over all; linear ones have none."""
    masks = settings.layer_masks
    areas = {mask: parse_mask(mask).area(settings.seq_len) for mask in set(masks)}
    return sum(areas[mask] for mask in masks) / settings.model.layers


def packed_shares(settings: TrialSettings, tokens: float, pairs: float) -> tuple[float, float]:
    """What rows with so many tokens and visible pairs of documents are of as many rows of one document each, in tokens
    and in pairs. A step has the rows of all micro-batches and replicas."""
    rows = settings.batch_size * settings.gradient_accumulation * settings.dp_size
    return tokens / (rows * settings.seq_len), pairs / (rows * layer_pairs(settings))


def head_share(settings: TrialSettings, tail: float) -> float:
    """Visible pairs of the queries whose outputs are not kept, as a share of `layer_pairs`, on average over all layers:
    also where only some of them are computed again, of which more than others may have a window."""
    masks = settings.layer_masks
    cut = tail_cut(tail, settings.seq_len, settings.cp_size)
    areas = {mask: FirstRows(parse_mask(mask), cut).area(settings.seq_len) for mask in set(masks)}
    return sum(areas[mask] for mask in masks) / settings.model.layers / max(1, layer_pairs(settings))


def _for_inputs(checkpoint: Checkpoint, again: int) -> int:
    """Layers that backward runs only for the next layer's input, within groups; their own recomputation comes later."""
    return layers_recomputed(checkpoint, again) if again else 0


def moment_bytes(settings: TrialSettings) -> float:
    """Bytes of AdamW's two moments per trained parameter, on average."""
    wide = max(4, BYTES_OF[settings.dtype])
    narrow = 0.0 if settings.optimizer_states is None else share_in_8_bits(settings.model)
    return 2 * (narrow * (1 + 4 / STATES_BLOCK) + (1 - narrow) * wide)


def gathering_bytes(settings: TrialSettings) -> float:
    """Bytes that a rank copies in its GPU's memory, with a micro-batch, to gather all parameters in forward and in
    backward and to reduce their gradients, where it does not keep them whole."""
    ranks = settings.world_size / settings.tp_size
    gathered = 2 * (_GATHER_OF_SHARD / ranks + _GATHER_OF_ALL) * settings.model.parameters
    return (gathered + _REDUCE_OF_ALL * settings.trained_parameters) / settings.tp_size

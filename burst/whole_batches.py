"""A model of transformers that takes whole batches, and computes each on the ranks that share its sequences.

Trainers count tokens, form losses and log metrics from what a model returns. So the model is the place to shard: it is
given whole sequences, the same on every rank, cuts them, and returns whole results, the same on every rank. A trainer
then needs no knowledge of it. What is of the size of a token's embedding or larger stays on its rank: per-token
log-probabilities are gathered, logits only where somebody asks for them.

Gradients of the results are multiplied by the number of ranks, because DDP and FSDP take the mean of the gradients of
all ranks, and here each has its own tokens' part of the sum.

Shape letters: B batch, S whole sequence, L this rank's tokens, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from burst.batch import shard_batch
from burst.transformers import BOUNDARIES, FLASH_NAMES, check_boundaries, refuse_layers, register, sees_one_rank
from engine.attention.context import ContextParallel

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "burst"  # of the attention, in transformers
_CUT = ("input_ids", "labels", "attention_mask", "position_ids")
_PASSED = ("num_items_in_batch", "return_dict", "fused_lm_head")
# What collators of packed rows add to position_ids, for kernels that take the lengths of documents.
_SAID_BY_POSITIONS = (*BOUNDARIES, "max_length_q", "max_length_k", "seq_idx")
_OF_TOKENS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")  # of TRL's LM head


def take_whole_batches(model: nn.Module, cp: ContextParallel) -> None:
    """From now on `model` is called with whole batches, the same on all ranks of `cp`, and returns whole results.

        burst.ContextParallel() -> cp
        take_whole_batches(model, cp)
        loss = model(input_ids=..., labels=...).loss      # of the whole batch, on every rank
        loss.backward()                                   # then take the mean of the gradients over the ranks

    `generate` works on whole sequences too: each rank computes all of it, without sharding.

    Args:
        model: a causal language model of transformers, or one of peft around it. Not yet wrapped by DDP or FSDP.
        cp: the ranks that share each sequence. It replaces the one of an earlier call.

    Raises ValueError for another model, and for layers that depend on tokens of other ranks. Calls raise
    it for inputs that are not known how to cut and for results that are not a sum over tokens.
    """
    inner = causal_model_of(model)
    if inner is None:
        raise ValueError(
            f"the model is a {type(model).__name__}, which is no causal language model of transformers; shard it by "
            "burst_attention"
        )
    _refuse_architecture(inner)
    _refuse_adapters(model)
    register(cp)
    known = getattr(model, "_burst", None)
    if known is not None:
        known.cp = cp
        return
    object.__setattr__(model, "_burst", _WholeBatches(model, inner, cp))


def causal_model_of(model: nn.Module) -> PreTrainedModel | None:
    """The model of transformers in `model`, or None where there is none that predicts tokens."""
    from transformers import PreTrainedModel

    inner = next((each for each in model.modules() if isinstance(each, PreTrainedModel)), None)
    return inner if inner is not None and inner.get_output_embeddings() is not None else None


@contextlib.contextmanager
def with_logits(model: nn.Module) -> Iterator[None]:
    """Calls that are given labels return the whole logits too, [B, S, V], inside this."""
    sharded = [each._burst for each in model.modules() if hasattr(each, "_burst")]
    for each in sharded:
        each.logits = True
    try:
        yield
    finally:
        for each in sharded:
            each.logits = False


def _refuse_architecture(inner: Any) -> None:
    """Raises ValueError for what a rank cannot compute from its own tokens and exact attention."""
    refuse_layers(inner)
    config = inner.config.get_text_config()
    if not getattr(config, "is_causal", True):
        raise ValueError(
            f"{type(inner).__name__} has is_causal False, and tokens would see the padding of a batch; shard it by "
            "burst.register and burst.shard_batch, without padding"
        )


def _refuse_adapters(model: nn.Module) -> None:
    """Raises ValueError for adapters of peft that add tokens, or ask which tokens there are."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        if config.is_prompt_learning or config.is_adaption_prompt or getattr(config, "alora_invocation_tokens", None):
            raise ValueError(
                f"adapter {name} is {config.peft_type.value}, which adds or looks for tokens of the whole sequence; "
                "take one of weights, such as LORA"
            )


class _WholeBatches:
    """The hooks of one model, and what the second needs to know of the first."""

    def __init__(self, model: nn.Module, inner: Any, cp: ContextParallel) -> None:
        self.cp = cp
        self.logits = False  # wanted beside a loss
        self._inner = inner
        self._seq_len = 0  # of the batch that is being computed; 0 when it is not sharded
        self._whole = False
        self._elsewhere = "sdpa" if getattr(inner, "_supports_sdpa", False) else "eager"
        model.register_forward_pre_hook(self._cut, with_kwargs=True)
        model.register_forward_hook(self._gather)
        inner.set_attn_implementation(NAME)
        generate = inner.generate

        def generate_whole(*args: Any, **kwargs: Any) -> Any:
            with self._unsharded():
                return generate(*args, **kwargs)

        inner.generate = generate_whole

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        raise ValueError("a model that takes whole batches cannot be copied; copy it before it is prepared")

    @contextlib.contextmanager
    def _unsharded(self) -> Iterator[None]:
        self._whole = True
        self._inner.set_attn_implementation(self._elsewhere)
        try:
            yield
        finally:
            self._whole = False
            self._inner.set_attn_implementation(NAME)

    def _cut(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._seq_len = 0
        if self._whole:
            return None
        if (attention := self._inner.config.get_text_config()._attn_implementation) not in (NAME, *FLASH_NAMES):
            raise ValueError(sees_one_rank(attention))
        if len(args) > 1:
            raise ValueError(f"the model is given {len(args)} inputs without names; pass them by name")
        if kwargs.get("return_dict") is False:
            raise ValueError("return_dict is False, and results are gathered by name; leave return_dict at its default")
        given = {"input_ids": args[0]} if args else {}
        given |= {name: value for name, value in kwargs.items() if value is not None and value is not False}
        known = (*_CUT, *_PASSED, *_SAID_BY_POSITIONS)
        if unknown := sorted(set(given) - set(known)):
            raise ValueError(
                f"the model is given {', '.join(unknown)}, which is not known how to cut; it takes {', '.join(_CUT)}"
            )
        batch = {name: given[name] for name in _CUT if name in given}
        _check_boundaries(given, batch)
        cut = shard_batch(batch, self.cp)
        if "labels" not in given:
            del cut["labels"], cut["shift_labels"], cut["num_items_in_batch"]
        self._seq_len = batch["input_ids"].shape[1]
        passed = {name: given[name] for name in _PASSED if name in given}
        return (), {**cut, **passed, "use_cache": False}

    def _gather(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        seq_len, self._seq_len = self._seq_len, 0
        if not seq_len:
            return None
        if not isinstance(output, dict):
            raise ValueError(f"the model returned a {type(output).__name__}; leave return_dict at its default")
        found = {name: value for name, value in output.items() if value is not None}
        if other := sorted(set(found) - {"loss", "logits", "past_key_values", *_OF_TOKENS}):
            raise ValueError(f"the model returned {', '.join(other)}, which is not known how to gather")
        has_loss = "loss" in found
        if has_loss:
            output["loss"] = _WholeSum.apply(found["loss"], self.cp)
        if "logits" in found:
            wanted = self.logits or not has_loss
            output["logits"] = self._of_all_ranks(found["logits"])[:, :seq_len] if wanted else None
        per_token = [name for name in _OF_TOKENS if name in found]
        if per_token:
            like = found["log_probs"]
            stacked = torch.stack([found[name].to(like.dtype) for name in per_token], dim=-1)
            # The label of a token is the next one, so the last has none, as in TRL's own results.
            whole = self._of_all_ranks(stacked)[:, : seq_len - 1]
            for name, tensor in zip(per_token, whole.unbind(-1), strict=True):
                output[name] = tensor.to(found[name].dtype)
        return output

    def _of_all_ranks(self, tensor: Tensor) -> Tensor:
        """The whole of this rank's tokens [B, L, ...]; its gradient, the same on all ranks, times their number."""
        scaled: Tensor = _TimesRanks.apply(tensor.contiguous(), self.cp.size)
        return self.cp.unshard(scaled, dim=1, gradient="same")


class _WholeSum(torch.autograd.Function):
    """The sum of the ranks' parts; backward gives each part the gradient times their number."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, cp: ContextParallel) -> Tensor:
        ctx.ranks = cp.size
        total = part.detach().clone()
        if cp.size > 1:
            dist.all_reduce(total, group=cp.group)
        return total

    @staticmethod
    def backward(ctx: Any, dtotal: Tensor) -> tuple[Tensor, None]:
        return dtotal * ctx.ranks, None


class _TimesRanks(torch.autograd.Function):
    """(tensor, ranks) -> tensor; backward gives it the gradient times their number."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, ranks: int) -> Tensor:
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.ranks, None


def _check_boundaries(given: Mapping[str, Any], batch: Mapping[str, Tensor]) -> None:
    """Raises ValueError where lengths of documents are not those of the positions."""
    named = [name for name in BOUNDARIES if name in given]
    if not named:
        return
    if "position_ids" not in batch:
        raise ValueError(f"{named[0]} is given without position_ids; pass those, which begin with 0 at each document")
    positions = batch["position_ids"].flatten()
    check_boundaries(given, [*(positions == 0).nonzero().flatten().tolist(), positions.numel()])

"""Sequences sharded by burst in accelerate, and in the Trainer of transformers and what is built on it (TRL).

accelerate knows one way to shard a sequence, torch's, which drops masks and refuses windows. `parallelism` makes a
`ParallelismConfig` with another: accelerate's own meshes and data loaders, which give the ranks of one sequence the
same batch, with attention and the cutting of batches from here. Three methods are replaced for it, `_prepare_cp` of
`Accelerator`, and `_prepare_context_parallel_inputs` and `prediction_step` of `Trainer`; under any other configuration
they do what they did.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor, nn

from burst.batch import shard_batch
from burst.transformers import register
from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import as_layout

if TYPE_CHECKING:
    from accelerate import ParallelismConfig

BACKEND = "burst"


def parallelism(cp_size: int, *, layout: str = "zigzag", **others: object) -> ParallelismConfig:
    """A `ParallelismConfig` whose sequences are sharded over `cp_size` ranks.

        args = TrainingArguments(..., parallelism_config=burst.accelerate.parallelism(cp_size=4))
        Trainer(model, args, train_dataset=packed).train()

    The model's attention becomes `burst` (`burst.register`) when it is prepared. Batches are whole on all ranks of a
    sequence and cut by `burst.shard_batch`, in training and in evaluation.

    Args:
        cp_size: ranks that share a sequence.
        layout: which tokens each rank holds: zigzag, contiguous or striped.
        others: of `ParallelismConfig`, such as `dp_shard_size`.

    Raises ImportError without accelerate, ValueError for an unknown layout and for what `ParallelismConfig` refuses.
    """
    try:
        from accelerate import ParallelismConfig
    except ImportError as error:
        raise ImportError("parallelism needs accelerate: pip install accelerate") from error
    from accelerate.utils import DistributedType

    class Parallelism(ParallelismConfig):
        """Also for CPU processes, which accelerate leaves to plain data parallelism."""

        def __post_init__(self) -> None:
            super().__post_init__()
            self.cp_backend = BACKEND  # after its check, which knows torch alone

        def _validate_accelerator(self, accelerator: Any) -> None:
            if accelerator.distributed_type != DistributedType.MULTI_CPU:
                super()._validate_accelerator(accelerator)
            elif self.total_size != accelerator.num_processes:
                raise ValueError(
                    f"there are {accelerator.num_processes} processes and the configuration describes "
                    f"{self.total_size}; start as many, or give dp_replicate_size or dp_shard_size"
                )

    config = Parallelism(cp_size=cp_size, **others)
    config.burst_layout = as_layout(layout).name
    _replace()
    return config


@functools.cache
def _replace() -> None:
    """Give both classes the methods that know this backend, once."""
    from accelerate import Accelerator
    from transformers import Trainer

    for owner, name, made in (
        (Accelerator, "_prepare_cp", _prepare_cp),
        (Trainer, "_prepare_context_parallel_inputs", _prepare_inputs),
        (Trainer, "prediction_step", _prediction_step),
    ):
        earlier = getattr(owner, name, None)
        if earlier is None:
            raise ImportError(
                f"{owner.__name__} has no {name}; this adapter knows accelerate 1.15 and transformers 5.23"
            )
        setattr(owner, name, functools.wraps(earlier)(made(earlier)))


def _is_ours(accelerator: Any) -> bool:
    return getattr(getattr(accelerator, "parallelism_config", None), "cp_backend", None) == BACKEND


def _prepare_cp(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(accelerator: Any, *args: Any) -> tuple[Any, ...]:
        if not _is_ours(accelerator):
            return tuple(earlier(accelerator, *args))
        config = accelerator.parallelism_config
        accelerator.burst_context = ContextParallel(accelerator.torch_device_mesh["cp"], layout=config.burst_layout)
        register(accelerator.burst_context)
        for each in args:
            if isinstance(each, nn.Module):
                _attend_sharded(each)
        return args

    return prepare


def _attend_sharded(model: nn.Module) -> None:
    """Give a model of transformers, wrapped or not, this package's attention. Raises ValueError for another model."""
    whole = next((each for each in model.modules() if hasattr(each, "set_attn_implementation")), None)
    if whole is None:
        raise ValueError(f"the model is a {type(model).__name__} and none of transformers; shard it by burst_attention")
    if whole.config._attn_implementation != BACKEND:
        whole.set_attn_implementation(BACKEND)


def _prepare_inputs(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(trainer: Any, model: nn.Module, inputs: dict[str, Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
        accelerator = trainer.accelerator
        if not _is_ours(accelerator) or not accelerator.parallelism_config.cp_enabled:
            context, same = earlier(trainer, model, inputs)
            return context, same
        _attend_sharded(model)  # evaluation prepares a model without `_prepare_cp`
        inputs = trainer._prepare_inputs(inputs)
        tokenizer = getattr(trainer, "processing_class", None)
        padding = getattr(tokenizer, "pad_token_id", None)
        cut = shard_batch(inputs, accelerator.burst_context, pad_token_id=padding or 0)
        del cut["num_items_in_batch"]  # the Trainer's own, over all its micro-batches
        return contextlib.nullcontext, dict(cut)

    return prepare


def _mean(loss: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    total = loss.clone()
    dist.all_reduce(total, group=group)
    return total / dist.get_world_size(group)


def _prediction_step(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def step(trainer: Any, *args: Any, **settings: Any) -> tuple[Any, Any, Any]:
        loss, logits, labels = earlier(trainer, *args, **settings)
        if _is_ours(trainer.accelerator) and loss is not None:
            # The Trainer may drop the values of some ranks, as of batches that were given twice.
            loss = _mean(loss, trainer.accelerator.burst_context.group)
        return loss, logits, labels

    return step

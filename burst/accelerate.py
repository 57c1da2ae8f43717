"""Sequences sharded by burst in accelerate, and in the Trainer of transformers and what is built on it (TRL).

accelerate knows one way to shard a sequence, torch's, which drops masks and refuses windows. `parallelism` makes a
`ParallelismConfig` with another: accelerate's own meshes and data loaders, which give the ranks of one sequence the
same batch, and models that take whole batches (`burst.whole_batches`). To a trainer, the ranks that share a sequence
are one process: it is told that no context parallelism is on, and counts and gathers what they have once. The methods
that are replaced for it are listed in `_replace`; under any other configuration they do what they did.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from burst.transformers import replace
from burst.whole_batches import causal_model_of, take_whole_batches, with_logits
from engine.attention.context import ContextParallel
from engine.attention.geometry.layout import as_layout

try:
    from accelerate import Accelerator, ParallelismConfig
    from accelerate.utils import DistributedType
except ImportError as error:
    raise ImportError("burst.accelerate needs accelerate: pip install accelerate") from error


class SharedSequences(ParallelismConfig):
    """What `parallelism` makes. Its meshes have the dimension `cp`; a trainer that asks is told that there is none."""

    burst_layout = ""  # which tokens each rank holds
    burst_trainers: tuple[str, ...] = ()  # names of the trainers of TRL that take it

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tp_size > 1 or self.sp_size > 1:
            raise ValueError(
                f"tp_size {self.tp_size} and sp_size {self.sp_size} are beside sequences sharded by burst; leave both "
                "at 1"
            )

    @property
    def cp_enabled(self) -> bool:
        return False

    @property
    def non_dp_dim_names(self) -> list[str]:
        return ["cp"] if self.cp_size > 1 else []

    @property
    def dp_shard_cp_dim_names(self) -> list[str]:
        return [*super().dp_shard_cp_dim_names, *self.non_dp_dim_names]

    @property
    def dp_cp_dim_names(self) -> list[str]:
        return [*super().dp_cp_dim_names, *self.non_dp_dim_names]

    def build_device_mesh(self, device_type: str) -> DeviceMesh:
        """The meshes, which accelerate makes before it looks at the number of processes."""
        if self.cp_size > 1:
            started = dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))
            self._refuse_others(started)
        return super().build_device_mesh(device_type)

    def _validate_accelerator(self, accelerator: Accelerator) -> None:
        if self.cp_size == 1 and accelerator.distributed_type != DistributedType.MULTI_CPU:
            super()._validate_accelerator(accelerator)
        else:
            self._refuse_others(accelerator.state.num_processes)

    def _refuse_others(self, processes: int) -> None:
        """Raise ValueError where there are more or fewer than the sizes multiply to."""
        if self.total_size != processes:
            raise ValueError(
                f"the configuration describes {self.total_size} processes, found {processes}; start as many, or give "
                "another cp_size, dp_replicate_size or dp_shard_size"
            )


def parallelism(cp_size: int, *, layout: str = "zigzag", **others: object) -> SharedSequences:
    """A `ParallelismConfig` whose sequences are sharded over `cp_size` ranks.

        args = TrainingArguments(..., parallelism_config=burst.accelerate.parallelism(cp_size=4))
        Trainer(model, args, train_dataset=packed).train()

    When a model is prepared, it gets the attention `burst` (`burst.register`), and takes whole batches from then on.

    Args:
        cp_size: ranks that share a sequence.
        layout: which tokens each rank holds: zigzag, contiguous or striped.
        others: of `ParallelismConfig`, such as `dp_shard_size`.

    Raises ValueError for an unknown layout, a `cp_size` that is no number of ranks, tensor parallelism beside it, and
    for what `ParallelismConfig` refuses.
    """
    if not isinstance(cp_size, int) or cp_size < 1:
        raise ValueError(f"cp_size is {cp_size!r}; give the number of ranks that share a sequence, such as 4")
    named = as_layout(layout).name
    config = SharedSequences(cp_size=cp_size, **others)
    config.burst_layout = named
    _replace()
    return config


def sharing_ranks(accelerator: object) -> int:
    """How many ranks share a sequence under a configuration of `parallelism`; 1 under another."""
    config = getattr(accelerator, "parallelism_config", None)
    return int(config.cp_size) if isinstance(config, SharedSequences) else 1


@functools.cache
def _replace() -> None:
    """Give the classes the methods that know such a configuration, once."""
    from transformers import Trainer

    replace(Accelerator, "prepare", _prepare)
    replace(Accelerator, "prepare_model", _prepare_model)
    replace(Accelerator, "gather", _gather)
    replace(Accelerator, "num_processes", _num_processes)
    replace(Trainer, "create_accelerator_and_postprocess", _create_accelerator)
    replace(Trainer, "_get_num_items_in_batch", _count_items)
    replace(Trainer, "floating_point_ops", _floating_point_ops)
    replace(Trainer, "prediction_step", _prediction_step)


def share_sequences(accelerator: Accelerator, model: nn.Module) -> None:
    """Make a model take whole batches, once. Raises ValueError beside what shards it in another way than FSDP2."""
    kind = accelerator.distributed_type
    if kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM) or (
        kind == DistributedType.FSDP and not accelerator.is_fsdp2
    ):
        raise ValueError(f"{kind.value} has not been tried with sequences sharded by burst; use FSDP2 (fsdp_version=2)")
    if not hasattr(accelerator, "burst_context"):
        layout = accelerator.parallelism_config.burst_layout
        accelerator.burst_context = ContextParallel(accelerator.torch_device_mesh["cp"], layout=layout)
    take_whole_batches(model, accelerator.burst_context)


def _prepare(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(accelerator: Any, *args: Any, **settings: Any) -> Any:
        if sharing_ranks(accelerator) > 1:
            for each in args:
                if isinstance(each, nn.Module):
                    share_sequences(accelerator, each)
        return earlier(accelerator, *args, **settings)

    return prepare


def _prepare_model(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(accelerator: Any, model: nn.Module, *args: Any, **settings: Any) -> Any:
        # One that predicts no tokens, such as a model of rewards, is prepared alone and computes whole sequences.
        if sharing_ranks(accelerator) > 1 and causal_model_of(model) is not None:
            share_sequences(accelerator, model)
        return earlier(accelerator, model, *args, **settings)

    return prepare


def _gather(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def gather(accelerator: Any, tensor: Any) -> Any:
        from accelerate.utils import recursively_apply

        gathered = earlier(accelerator, tensor)
        return recursively_apply(lambda each: of_first_ranks(sharing_ranks(accelerator), each), gathered)

    return gather


def of_first_ranks(ranks: int, gathered: Tensor) -> Tensor:
    """What the first of each `ranks` processes that share a sequence gave, of what all gave: [processes x n, ...]."""
    if ranks == 1:
        return gathered
    return gathered.unflatten(0, (dist.get_world_size() // ranks, ranks, -1))[:, 0].flatten(0, 1)


def _num_processes(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def num_processes(accelerator: Any) -> int:
        return int(earlier(accelerator)) // sharing_ranks(accelerator)

    return num_processes


def _create_accelerator(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def create(trainer: Any) -> None:
        earlier(trainer)
        if sharing_ranks(trainer.accelerator) > 1:
            _refuse_trainer(trainer)
            if trainer.args.neftune_noise_alpha:
                raise ValueError(
                    f"neftune_noise_alpha is {trainer.args.neftune_noise_alpha}, and its noise depends on the length "
                    "of a sequence, of which a rank sees a part; leave it out"
                )

    return create


def _refuse_trainer(trainer: Any) -> None:
    """Raises ValueError for a trainer of TRL whose way with batches has not been compared with one process."""
    of_trl = [each.__name__ for each in type(trainer).__mro__ if each.__module__.startswith("trl.")]
    if not of_trl:
        return
    opened = trainer.accelerator.parallelism_config.burst_trainers
    if not opened:
        raise ValueError(
            f"{of_trl[0]} is a trainer of TRL; pass burst.trl.parallelism(cp_size=...) as its configuration"
        )
    if not set(opened) & set(of_trl):
        raise ValueError(f"{of_trl[0]} has not been compared with one process; use one of {', '.join(opened)}")


def _count_items(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def count(trainer: Any, *args: Any, **settings: Any) -> Any:
        items = earlier(trainer, *args, **settings)
        # It divides by the ranks that share a sequence, whose items were gathered once.
        return items if items is None else items * sharing_ranks(trainer.accelerator)

    return count


def _floating_point_ops(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def of_rank(trainer: Any, inputs: Any) -> Any:
        return earlier(trainer, inputs) / sharing_ranks(trainer.accelerator)  # the Trainer adds those of all ranks

    return of_rank


def _prediction_step(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def step(trainer: Any, model: nn.Module, inputs: Any, prediction_loss_only: bool, **settings: Any) -> Any:
        with with_logits(model) if not prediction_loss_only else contextlib.nullcontext():
            return earlier(trainer, model, inputs, prediction_loss_only, **settings)

    return step

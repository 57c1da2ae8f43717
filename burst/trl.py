"""Sequences sharded by burst in the trainers of TRL: SFT, DPO, KTO, GRPO and RLOO.

TRL refuses packing and GRPO under the context parallelism of accelerate, which drops masks and cuts what a data loader
gives. Here the model takes whole batches, so its trainers see none of it; logits are never whole, because TRL's own LM
head computes log-probabilities of this rank's tokens tile by tile, and only those are gathered.

GRPO and RLOO make their batches themselves, from what they generate. All ranks of a sequence need the same: they have
one seed, take completions from the first of them, and count its rewards once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import burst.accelerate as adapter
from burst.accelerate import of_first_ranks, share_sequences, sharing_ranks
from burst.transformers import replace
from burst.whole_batches import causal_model_of

TRAINERS = ("SFTTrainer", "DPOTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")  # compared with one process


def parallelism(cp_size: int, *, layout: str = "zigzag", **others: object) -> adapter.SharedSequences:
    """The configuration of `burst.accelerate.parallelism`, for `SFTConfig`, `DPOConfig`, `GRPOConfig` and the like.

        args = SFTConfig(..., packing=True, parallelism_config=burst.trl.parallelism(cp_size=4))
        SFTTrainer(model, args, train_dataset=dataset).train()

    Raises ImportError without TRL, and ValueError for what `burst.accelerate.parallelism` refuses. Other trainers of
    TRL, and other ways to generate (vLLM, continuous batching), are refused by name when they start.
    """
    try:
        import trl  # noqa: F401
    except ImportError as error:
        raise ImportError("parallelism needs TRL: pip install trl") from error
    config = adapter.parallelism(cp_size, layout=layout, **others)
    config.burst_trainers = TRAINERS
    _replace()
    return config


@functools.cache
def _replace() -> None:
    """Give the trainers the functions and methods that know such a configuration, once."""
    from trl.trainer import dpo_trainer, grpo_config, grpo_trainer, kto_trainer, rloo_config, rloo_trainer

    for module in (dpo_trainer, kto_trainer, grpo_trainer, rloo_trainer):
        replace(module, "prepare_fsdp", _prepare_fsdp)
    for config in (grpo_config.GRPOConfig, rloo_config.RLOOConfig):
        replace(config, "__post_init__", _post_init)
    for module, trainer in (
        (grpo_trainer, grpo_trainer.GRPOTrainer),
        (rloo_trainer, rloo_trainer.RLOOTrainer),
    ):
        replace(module, "set_seed", _set_seed)
        replace(module, "gather", _gather)
        replace(module, "gather_object", _gather_object)
        replace(trainer, "_generate", _generate)
        replace(trainer, "_generate_and_score_completions", _generate_and_score)


def _prepare_fsdp(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def prepare(model: nn.Module, accelerator: Any) -> Any:
        if sharing_ranks(accelerator) > 1 and causal_model_of(model) is not None:
            share_sequences(accelerator, model)  # a reference, which accelerate does not prepare here
        return earlier(model, accelerator)

    return prepare


def _post_init(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def post_init(args: Any) -> None:
        ranks = sharing_ranks(args)
        if ranks == 1:
            return earlier(args)
        for name in ("use_vllm", "use_transformers_continuous_batching"):
            if getattr(args, name):
                raise ValueError(f"{name} has not been tried with sequences sharded by burst; leave it at False")
        whole = type(args).world_size
        # Batches are counted by processes, and the ranks of one sequence are one.
        with mock.patch.object(type(args), "world_size", property(lambda self: whole.fget(self) // ranks)):
            return earlier(args)

    return post_init


def _generate_and_score(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def generate_and_score(trainer: Any, inputs: list[Any]) -> Any:
        ranks, kind = sharing_ranks(trainer.accelerator), type(trainer.accelerator)
        if ranks == 1:
            return earlier(trainer, inputs)
        # It finds its own part of all rewards, which are there once for each sequence, by the index of its process.
        with mock.patch.object(kind, "process_index", property(lambda self: self.state.process_index // ranks)):
            return earlier(trainer, inputs)

    return generate_and_score


def _state() -> Any:
    """What stands for the accelerator in functions that are given none: its process count is not yet divided."""
    from accelerate.state import AcceleratorState

    return AcceleratorState()


def _set_seed(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def set_seed(seed: int, device_specific: bool = False, **settings: Any) -> None:
        if device_specific and (ranks := sharing_ranks(state := _state())) > 1:
            seed, device_specific = seed + state.process_index // ranks, False
        earlier(seed, device_specific=device_specific, **settings)

    return set_seed


def _gather(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def gather(tensor: Any) -> Any:
        return of_first_ranks(sharing_ranks(_state()), earlier(tensor))

    return gather


def _gather_object(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def gather_object(values: list[Any]) -> list[Any]:
        ranks = sharing_ranks(_state())
        if ranks == 1:
            return list(earlier(values))
        return [value for of_process in earlier([values])[::ranks] for value in of_process]

    return gather_object


def _generate(earlier: Callable[..., Any]) -> Callable[..., Any]:
    def generate(trainer: Any, prompts: list[Any]) -> Any:
        made = earlier(trainer, prompts)
        if sharing_ranks(trainer.accelerator) == 1:
            return made
        # Sampling and tools may differ between ranks, and so would all that follows, down to the order of a batch.
        shared = [(made, torch.get_rng_state())]
        cp = trainer.accelerator.burst_context
        dist.broadcast_object_list(shared, group=cp.group, group_src=0)
        made, random_state = shared[0]
        torch.set_rng_state(random_state)
        return made

    return generate

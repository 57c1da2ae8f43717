"""Small trainings for ranks that share sequences, and for one process: the same program, the same numbers.

Each returns plain values: every number that a trainer logged but times, and sums over its parameters.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed as dist

WORDS = 60
TIMES = ("runtime", "per_second", "time")
COMMON: dict[str, Any] = {
    "report_to": [], "save_strategy": "no", "seed": 0, "disable_tqdm": True, "use_cpu": True, "logging_steps": 1,
    "learning_rate": 1e-2, "max_steps": 2, "eval_strategy": "steps", "eval_steps": 2, "bf16": False,
    "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "gradient_accumulation_steps": 2,
}  # fmt: skip


def as_launched() -> int:
    """What a launcher sets in the environment of a rank. Returns the number of ranks."""
    ranks = dist.get_world_size()
    os.environ |= {"RANK": str(dist.get_rank()), "LOCAL_RANK": str(dist.get_rank()), "WORLD_SIZE": str(ranks)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0", "HF_HUB_OFFLINE": "1"}
    if ranks == 1:
        del os.environ["LOCAL_RANK"]  # accelerate would take one process for a distributed one
    return ranks


def llama(**changed: Any) -> Any:
    """A small model: the same weights in each call."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    tokens = {"vocab_size": WORDS + 4, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_key_value_heads=2, use_cache=False, **changed))


def tokenizer() -> Any:
    """Words w0 to w59, each a token."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    words = {word: at for at, word in enumerate([*special, *(f"w{number}" for number in range(WORDS))])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), special, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def texts(count: int, longest: int, seed: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, longest, (count,), generator=generator).tolist()
    return [
        " ".join(f"w{word}" for word in torch.randint(0, WORDS, (n,), generator=generator).tolist()) for n in lengths
    ]


def logged(trainer: Any, fsdp: bool) -> dict[str, float]:
    """Everything that was logged, but times, and sums of the parameters' magnitudes, by name."""
    found = {
        f"{at} {name}": float(value)
        for at, entry in enumerate(trainer.state.log_history)
        for name, value in entry.items()
        if not any(time in name for time in TIMES)
    }
    model = trainer.accelerator.unwrap_model(trainer.model)
    assert any(hasattr(each, "full_tensor") for each in model.parameters()) == fsdp
    whole = ((name, getattr(each, "full_tensor", lambda each=each: each)()) for name, each in model.named_parameters())
    return found | {name: each.detach().double().abs().sum().item() for name, each in whole}


def train(kinds: tuple[str, ...], model: str, sizes: dict[str, int], fsdp: bool = False) -> dict[str, dict[str, float]]:
    """Train by the trainer of TRL that each kind names the model of a folder. Returns what each logged.

    `sizes` are those of `burst.trl.parallelism`; without any, ranks are those of data parallelism.
    """
    as_launched()
    if fsdp:
        _shard_parameters_of_cpus()
    import trl
    from datasets import Dataset

    import burst.trl

    shared = {"parallelism_config": burst.trl.parallelism(**sizes)} if sizes else {}
    found = {}
    for kind in kinds:
        name = kind.split()[0]
        with tempfile.TemporaryDirectory() as folder:
            own, data, given = _settings(kind)
            arguments = getattr(trl, f"{name}Config")(output_dir=folder, **COMMON | own, **shared)
            dataset = Dataset.from_dict(data)
            trainer = getattr(trl, f"{name}Trainer")(
                model, args=arguments, train_dataset=dataset, eval_dataset=dataset.select(range(3)),
                processing_class=tokenizer(), **given,
            )  # fmt: skip
            trainer.train()
            found[kind] = logged(trainer, fsdp)
    return found


def _settings(kind: str) -> tuple[dict[str, Any], dict[str, list[Any]], dict[str, Any]]:
    """(settings of the configuration, columns of the data, arguments of the trainer)."""
    prompts, answers, others = (texts(24, longest, seed) for seed, longest in enumerate((8, 18, 11)))
    packing, of_answers = {"packing": True, "max_length": 45}, {"prompt": prompts, "completion": answers}
    generation = {
        "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "num_generations": 4, "beta": 0.1,
        "steps_per_generation": 4, "max_completion_length": 9, "max_steps": 3,
    }  # fmt: skip
    rewards = {"reward_funcs": _reward}
    of_kind: dict[str, tuple[dict[str, Any], dict[str, list[Any]], dict[str, Any]]] = {
        "SFT packed": (packing, {"text": answers}, {}),
        "SFT padded": ({"loss_type": "dft"}, of_answers, {}),
        "SFT LoRA": (packing, {"text": answers}, {"peft_config": lora()}),
        "DPO": ({}, {"prompt": prompts, "chosen": answers, "rejected": others}, {}),
        "KTO": ({"per_device_train_batch_size": 4}, of_answers | {"label": [at % 3 != 0 for at in range(24)]}, {}),
        "GRPO": (generation | {"scale_rewards": "batch"}, {"prompt": prompts}, rewards),
        "RLOO": (generation, {"prompt": prompts}, rewards),
    }
    return of_kind[kind]


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)


def _reward(completions: list[str], **_: Any) -> list[float]:
    return [len(set(each.split())) + 0.3 * each.count("w1") for each in completions]


def transformers_trainer(fsdp: bool, folder: str) -> dict[str, Any]:
    """Train by the Trainer of transformers on packed rows, evaluate with a metric of its predictions, and predict. The
    last step is taken again from a checkpoint, and one with a loss that the Trainer forms from whole logits."""
    ranks = as_launched()
    if fsdp:
        _shard_parameters_of_cpus()
    from transformers import Trainer, TrainingArguments

    import burst.accelerate

    shared = {"parallelism_config": burst.accelerate.parallelism(cp_size=ranks)} if ranks > 1 else {}
    generator = torch.Generator().manual_seed(1)
    rows = [_packed_row(lengths, generator) for lengths in ((20, 5, 12), (30, 7), (37,), (1, 36), (9, 28))]

    def trainer_with(**changed: Any) -> Trainer:
        settings = {"output_dir": folder, **COMMON, "save_strategy": "steps", "save_steps": 1, **shared, **changed}
        given = {"train_dataset": rows, "eval_dataset": rows[:3], "compute_metrics": _accuracy}
        return Trainer(llama(), TrainingArguments(**settings), **given)

    trainer = trainer_with()
    trainer.train()
    predicted = trainer.predict(rows[:3])
    found = logged(trainer, fsdp) | {"predictions": predicted.predictions, "labels": predicted.label_ids}
    if not fsdp:
        again, smoothed = trainer_with(), trainer_with(label_smoothing_factor=0.1)
        again.train(resume_from_checkpoint=f"{folder}/checkpoint-1")
        smoothed.train()
        for name, other in (("again", again), ("smoothed", smoothed)):
            found |= {f"{name} {key}": value for key, value in logged(other, fsdp).items()}
    return found


def _shard_parameters_of_cpus() -> None:
    """accelerate knows FSDP2 on accelerators alone: CPU ranks get what its state would have there."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    earlier = AcceleratorState.__init__

    def initialise(state: AcceleratorState, *args: Any, **settings: Any) -> None:
        earlier(state, *args, **settings)
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"], cpu_ram_efficient_loading=False,
        )  # fmt: skip
        state.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    AcceleratorState.__init__ = initialise


def _packed_row(lengths: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    positions = torch.cat([torch.arange(length) for length in lengths])
    tokens = torch.randint(4, WORDS + 4, positions.shape, generator=generator)
    return {"input_ids": tokens, "labels": tokens.masked_fill(positions == 0, -100), "position_ids": positions}


def _accuracy(evaluation: Any) -> dict[str, float]:
    found, expected = evaluation.predictions.argmax(-1)[:, :-1], evaluation.label_ids[:, 1:]
    return {"accuracy": float((found == expected)[expected != -100].mean())}

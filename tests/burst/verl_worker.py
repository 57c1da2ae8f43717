"""verl's own worker for FSDP2 on CPU ranks, under torchrun: `verl_worker.py FOLDER` of a model. Rank 0 prints each
step's gradient norm.

The program sets verl's platform to the CPU. FSDP adds gradients before it divides them, because gloo has no sum with a
factor.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from verl.plugin.platform import get_platform

platform: Any = type(get_platform())
platform.device_name = property(lambda self: "cpu")
platform.device_module = property(lambda self: torch.cpu)
platform.current_device = lambda self: torch.device("cpu")
platform.communication_backend_name = lambda self: "gloo"
cpu: Any = torch.cpu
cpu.empty_cache = cpu.ipc_collect = cpu.reset_peak_memory_stats = lambda *_: None
cpu.memory_allocated = cpu.memory_reserved = cpu.max_memory_allocated = cpu.max_memory_reserved = lambda *_: 0
cpu.mem_get_info = lambda *_: (1, 2)

from verl.models.transformers import monkey_patch  # noqa: E402
from verl.trainer.config import CheckpointConfig  # noqa: E402
from verl.utils import tensordict_utils  # noqa: E402
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig  # noqa: E402
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead  # noqa: E402

LENGTHS = (50, 6, 39)


def loss_of(model_output: dict[str, Any], data: Any, dp_group: Any = None) -> tuple[torch.Tensor, dict[str, float]]:
    return -model_output["log_probs"].values().sum() / sum(LENGTHS), {}


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    monkey_patch.is_trl_available = lambda: False  # TRL 1.16 no longer has what it looks for
    fp32 = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
    engine = FSDPEngineWithLMHead(
        HFModelConfig(path=folder, external_lib="burst.verl", override_config={"attn_implementation": "burst"}),
        FSDPEngineConfig(
            strategy="fsdp2", ulysses_sequence_parallel_size=dist.get_world_size(), use_torch_compile=False,
            model_dtype="fp32", mixed_precision=fp32, use_dynamic_bsz=False, micro_batch_size_per_gpu=len(LENGTHS),
        ),
        FSDPOptimizerConfig(lr=1e-2, total_training_steps=10),
        CheckpointConfig(),
    )  # fmt: skip
    engine.initialize()
    for module in engine.module.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    generator = torch.Generator().manual_seed(1)
    rows = {
        "input_ids": [torch.randint(3, 64, (length,), generator=generator) for length in LENGTHS],
        "position_ids": [torch.arange(length) for length in LENGTHS],
        "loss_mask": [torch.ones(length) for length in LENGTHS],
    }
    nested: dict[str, Any] = {
        name: torch.nested.as_nested_tensor(each, layout=torch.jagged) for name, each in rows.items()
    }
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": len(LENGTHS), "calculate_entropy": False}
    for _ in range(3):
        data = tensordict_utils.get_tensordict(nested | {"temperature": torch.ones(len(LENGTHS))}, settings)
        with engine.train_mode():
            found = engine.train_batch(data, loss_of)
        if dist.get_rank() == 0:
            print(f"gradient norm {found['metrics']['grad_norm']:.5f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

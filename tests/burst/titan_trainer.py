"""torchtitan's whole trainer on CPU ranks, under torchrun: `titan_trainer.py FOLDER` of a tokenizer and texts. Rank 0
prints each step's gradient norm.

torchtitan supports GPUs only. This program replaces what needs one: the device is the CPU, masks are made without
torch.compile, and FSDP adds gradients before it divides them, because gloo has no sum with a factor. Each weight is
drawn with a seed from its name, so that all numbers of ranks begin with the same weights.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch._utils

torch._utils._get_available_device_type = lambda: "cpu"  # before torchtitan asks
cpu: Any = torch.cpu
cpu.get_device_properties = lambda *_: SimpleNamespace(total_memory=1)
cpu.get_device_name = lambda *_: "cpu"
cpu.memory_stats = lambda *_, **__: {}
cpu.reset_peak_memory_stats = cpu.empty_cache = lambda *_: None
cpu.manual_seed_all = torch.manual_seed

import torch.distributed.tensor.experimental._context_parallel._attention as torch_cp  # noqa: E402
import torchtitan.models.common.attention as titan  # noqa: E402
from torch.distributed.fsdp import FSDPModule  # noqa: E402
from torch.distributed.tensor import DTensor, distribute_tensor  # noqa: E402
from torch.nn.attention.flex_attention import create_block_mask  # noqa: E402
from torchtitan.config import OverrideConfig, ParallelismConfig  # noqa: E402
from torchtitan.distributed import utils  # noqa: E402
from torchtitan.models.llama3 import model_registry  # noqa: E402
from torchtitan.models.llama3.config_registry import llama3_debugmodel  # noqa: E402
from torchtitan.trainer import Trainer  # noqa: E402


def main(folder: Path) -> None:
    titan._compiled_create_block_mask = torch_cp._compiled_create_block_mask = create_block_mask
    utils.set_pg_timeouts = lambda *_, **__: None  # asks for the number of the GPU
    config = llama3_debugmodel()
    config.model_spec = model_registry("debugmodel", attn_backend="flex")
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.hf_assets_path, config.dataloader.dataset_path = str(folder), str(folder / "data")
    config.dump_folder = str(folder / f"rank{os.environ['RANK']}")
    training = config.training
    training.local_batch_size = training.global_batch_size = 2
    training.seq_len, training.steps, training.mixed_precision_param = 512, 3, "float32"
    config.compile.enable = config.checkpoint.enable = config.validator.enable = False
    config.activation_checkpoint, training.disable_cuda_graphs = None, True
    # With `spmd_types`, torch 2.13 refuses FSDP beside context parallelism, also without the override.
    config.parallelism = ParallelismConfig(
        context_parallel_degree=int(os.environ["WORLD_SIZE"]), spmd_backend="full_dtensor"
    )
    config.override = OverrideConfig(imports=["burst.torchtitan.attention"])
    trainer = Trainer(config)
    (model,) = trainer.model_parts
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            seed = int(hashlib.sha256(name.encode()).hexdigest()[:8], 16)
            drawn = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) * 0.05 + (
                "norm" in name
            )
            assert isinstance(parameter, DTensor), "FSDP shards every parameter"
            parameter.copy_(distribute_tensor(drawn, parameter.device_mesh, parameter.placements))
    logged = trainer.metrics_processor.log

    def log(step: int, loss: float, greatest: float, grad_norm: float, *others: Any, **more: Any) -> None:
        logged(step, loss, greatest, grad_norm, *others, **more)
        if os.environ["RANK"] == "0":
            print(f"step {step}: gradient norm {grad_norm:.4f}", flush=True)

    trainer.metrics_processor.log = log
    trainer.train()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

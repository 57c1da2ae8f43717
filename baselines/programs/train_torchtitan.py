"""Run by torchtitan's interpreter: registers the trial's Llama and tokens, then runs torchtitan's own trainer.

`python train_torchtitan.py REQUEST.json TORCHTITAN-OPTIONS...`, one process per rank, with torchrun's variables.
"""

import dataclasses
import functools
import json
import sys
import types

from program_parts import batch, say

sys.path[:1] = []  # the folder of this program

import torch  # noqa: E402


def ffn_multiplier(hidden, ffn):
    """What torchtitan multiplies its own size of the MLP, 8/3 of hidden, with, and rounds up to a multiple of."""
    own = int(2 * 4 * hidden / 3)
    return ffn / own if int(ffn / own * own) == ffn else (ffn + 0.5) / own


def register(request):
    from torchtitan.components import metrics
    from torchtitan.components.dataloader import BaseDataLoader
    from torchtitan.models.llama3 import TransformerModelArgs, get_train_spec
    from torchtitan.protocols.train_spec import register_train_spec

    class TrialTokens(BaseDataLoader):
        """Whole sequences; every rank of a data-parallel group has its own."""

        def __init__(self, dp_world_size=1, dp_rank=0, **_):
            self.replicas, self.replica = dp_world_size, dp_rank

        def __iter__(self):
            for step in range(request["steps"]):
                inputs, labels = batch(request, step, self.replica, self.replicas)
                yield {"input": inputs}, labels

        def state_dict(self):
            return {}

        def load_state_dict(self, state_dict):
            pass

    class Peaks(metrics.DeviceMemoryMonitor):
        """Prints what is allocated, too: its own log has what is reserved."""

        def get_peak_stats(self):
            say(0, peak_allocated_bytes=[torch.cuda.max_memory_allocated()])
            return super().get_peak_stats()

    metrics.DeviceMemoryMonitor = Peaks
    shape = TransformerModelArgs(
        dim=request["hidden"],
        n_layers=request["layers"],
        n_heads=request["heads"],
        n_kv_heads=request["kv_heads"],
        vocab_size=request["vocab"],
        multiple_of=1,
        ffn_dim_multiplier=ffn_multiplier(request["hidden"], request["ffn"]),
        norm_eps=request["norm_eps"],
        rope_theta=request["rope_base"],
    )
    spec = get_train_spec()
    register_train_spec(
        "burst_harness",
        dataclasses.replace(
            spec, model_args={"trial": shape}, build_dataloader_fn=TrialTokens, build_tokenizer_fn=None
        ),
    )


def attend_with_fa4():
    """Torch's own switch has its flash operation call FlashAttention-4. The wrapper may ask for nothing else, so that
    where this cannot run the trial fails and no other kernel is measured.

    Torch up to 2.13 takes two values from the library's forward, and the library's beta 36 returns five: the module
    that torch is given hands on the first two, output and LSE. Where torch recomputes whole layers, it gives an output
    whose dimension of one sequence has stride 0. That is no broadcast, but the library refuses it.
    """
    from flash_attn.cute import interface
    from torch.nn.attention import SDPBackend, activate_flash_attention_impl, register_flash_attention_impl
    from torch.nn.attention._fa4 import register_flash_attention_fa4
    from torchtitan.models.attention import ScaledDotProductAttentionWrapper

    def forward(*tensors, out=None, **named):
        if out is not None:
            strides = (
                stride if size > 1 else out.numel() for size, stride in zip(out.shape, out.stride(), strict=True)
            )
            out = out.as_strided(out.shape, tuple(strides))
        return interface._flash_attn_fwd(*tensors, out=out, **named)[:2]

    given = types.ModuleType("flash_attention_4_of_two_results")
    given._flash_attn_fwd = forward
    given._flash_attn_bwd = interface._flash_attn_bwd
    sys.modules[given.__name__] = given
    register = functools.partial(register_flash_attention_fa4, module_path=given.__name__)
    register_flash_attention_impl("FA4", register_fn=register)
    activate_flash_attention_impl("FA4")
    ScaledDotProductAttentionWrapper.sdpa_backends = [SDPBackend.FLASH_ATTENTION]


def count_grouped_heads():
    """Have torch's count of attention's FLOPs take fewer KV heads than query heads, as later releases do by themselves:
    with a budget of memory torch weighs by it what to recompute, and 2.11 ends the trial where the numbers differ."""
    from torch.utils import flop_counter

    def counting(name):
        count = getattr(flop_counter, name)

        def counted(first, *others):  # the first has the query heads, each with keys and values of its own
            return count(first, *((batch, first[1], length, dim) for batch, _, length, dim in others))

        return counted

    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        setattr(flop_counter, name, counting(name))


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    register(request)
    if request["kernel"] == "fa4":
        attend_with_fa4()
    if "--activation_checkpoint.memory_budget" in sys.argv:
        count_grouped_heads()
    from torchtitan.config import ConfigManager
    from torchtitan.train import Trainer
    from torchtitan.train import main as train

    ConfigManager.parse_args.__defaults__ = (sys.argv[2:],)  # it keeps the arguments of the time it was imported
    train(Trainer)


if __name__ == "__main__":
    main()

"""LoongTrain's double ring, its file unmodified; run by the interpreter of its environment.

The file imports two modules of InternEvo and one of Burst-Attention that its ring does not need: empty ones stand in.
"""

import importlib
import sys
import types

import torch.distributed as dist


def stand_in(name, **names):
    module = types.ModuleType(name)
    module.__dict__.update(names)
    sys.modules[name] = module
    return module


def own_group(sets):
    """This rank's group among `sets`, all of which every rank has to make."""
    group, _ = dist.new_subgroups_by_enumeration(sets)
    return group


def prepare(request, group):
    for name in ("internlm", "internlm.core", "internlm.core.context"):
        stand_in(name).__path__ = []
    context = types.SimpleNamespace(is_forward=True, config=types.SimpleNamespace(selective_checkpoint=False))
    stand_in("internlm.core.context.parallel_context", global_context=context)
    stand_in("burst_attn", burst_attn_func=None)
    stand_in("loongtrain_ring").__path__ = [request["source"]]
    name = "zigzag_ring_flash_attn_with_sliding_window"
    module = importlib.import_module("loongtrain_ring." + name)
    ring = module.zigzag_ring_flash_attn_qkvsplited_func_with_sliding_window

    size, window = dist.get_world_size(group), request["window"]
    windows = size // window
    inside = [list(range(one * window, (one + 1) * window)) for one in range(windows)]
    across = [[one * window + place for one in range(windows)] for place in range(window)]
    groups = {
        "context_group": group,
        "inter_window_group": own_group(across),
        "intra_window_group": own_group(inside),
        "dkv_inter_window_group": own_group(across),
        "dkv_intra_window_group": own_group(inside),
    }
    return lambda q, k, v: ring(q, k, v, causal=True, **groups)

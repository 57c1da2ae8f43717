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


def groups_of(sets, rank):
    """This rank's group among `sets`, all of which every rank has to make."""
    made = [(each, dist.new_group(each)) for each in sets]
    return next(group for each, group in made if rank in each)


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

    size, rank, window = dist.get_world_size(group), dist.get_rank(group), request["window"]
    windows = size // window
    inside = [list(range(one * window, (one + 1) * window)) for one in range(windows)]
    across = [[one * window + place for one in range(windows)] for place in range(window)]
    groups = {
        "context_group": group,
        "inter_window_group": groups_of(across, rank),
        "intra_window_group": groups_of(inside, rank),
        "dkv_inter_window_group": groups_of(across, rank),
        "dkv_intra_window_group": groups_of(inside, rank),
    }
    return lambda q, k, v: ring(q, k, v, causal=True, **groups)

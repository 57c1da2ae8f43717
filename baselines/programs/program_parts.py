"""What several programs of this folder need. A program imports it before it removes the folder from Python's path."""

import importlib.util
import json
import os
import sys

MARK = "UPSTREAM "  # begins each line that `baselines.called` reads


def load(path):
    """The module at a path."""
    spec = importlib.util.spec_from_file_location("call", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def say(rank, **line):
    """Rank 0 prints one line of JSON."""
    if rank == 0:
        print(MARK + json.dumps(line), flush=True)


def say_peaks(rank, world):
    """Rank 0 prints each rank's peaks of the allocator, empty on CPU ranks. Collective over several ranks."""
    import torch
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    own = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if cuda else []
    gathered = [own] * world
    if world > 1:
        dist.all_gather_object(gathered, own)
    allocated, reserved = ([each[kind] for each in gathered] if cuda else [] for kind in (0, 1))
    say(rank, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)


def leave():
    """End the process at once: while an interpreter ends in order, a thread of gloo that drops tensors aborts it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def batch(request, step, replica, replicas):
    """Whole sequences of one step and replica from the trial's file of tokens: inputs, and the next tokens. With
    `inputs` in the request they are those of that file in every step."""
    import torch

    if "inputs" in request:
        drawn = torch.load(request["inputs"])
        return drawn[:, :-1], drawn[:, 1:]
    size, length = request["batch_size"], request["seq_len"]
    first = (step * replicas + replica) * size
    with open(request["tokens"], "rb") as file:
        file.seek(4 * first * length)
        run = torch.frombuffer(bytearray(file.read(4 * (size * length + 1))), dtype=torch.int32).long()
    return run[:-1].view(size, length), run[1:].view(size, length)


def model_config(request):
    """The trial's model as a configuration of transformers."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**request["config"], use_cache=False)


def model_class(request):
    """Its class in transformers."""
    import transformers

    return getattr(transformers, request["config"]["architectures"][0])


def attention_name(request):
    """The name of the attention function of transformers that the trial asks for."""
    return "flash_attention_4" if request["kernel"] == "fa4" else "sdpa"


def register_ulysses(config, request):
    """Have transformers attend by DeepSpeed's UlyssesSPAttentionHF over `cp_size` ranks; returns its process groups."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    config._attn_implementation = attention_name(request)
    return UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=type("Model", (), {"config": config}),
        core_attn_implementation=attention_name(request),
        sequence_parallel_size=request["cp_size"],
        micro_batch_size=request["batch_size"],
        seq_length=request["seq_len"],
        seq_length_is_variable=False,
    )

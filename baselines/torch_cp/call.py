"""torch's own ring attention, as `burst setup baselines fidelity` calls it (baselines/programs/attention.py).

Its public context manager replaces torch's attention on GPUs alone. The ring below it takes the attention of one block
as an argument: here torch's for CPUs. `public` in the request calls the public one.
"""

import contextlib
import importlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

MODULE = "torch.distributed.tensor.experimental._context_parallel._attention"
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
ENTERED = contextlib.ExitStack()  # left at the end of the process


def prepare(request, group):
    ring = importlib.import_module(MODULE)
    ring._cp_options.enable_load_balance = request["layout"] == "zigzag"
    if request.get("public"):
        return public(group, request["seq_len"])
    ring.set_rotate_method("alltoall")  # K and V from neighbour to neighbour; its default gathers all of them

    def block(query, key, value, is_causal=False, **_):
        return FORWARD(query, key, value, 0.0, is_causal)

    def block_backward(grad_out, query, key, value, out, logsumexp, is_causal=False, **_):
        return BACKWARD(grad_out, query, key, value, out, logsumexp, 0.0, is_causal)

    class RingFunction(torch.autograd.Function):
        @staticmethod
        def forward(ctx, q, k, v):
            out, lse, *_ = ring._templated_ring_attention(group, 2, block, q, k, v, is_causal=True)
            ctx.save_for_backward(q, k, v, out, lse)
            return out

        @staticmethod
        def backward(ctx, dout):
            q, k, v, out, lse = ctx.saved_tensors
            gradients = ring._templated_ring_attention_backward(
                group, 2, block_backward, dout.contiguous(), "grad_out", q, k, v, out, lse, is_causal=True
            )
            return gradients[:3]

    def attend(q, k, v):
        q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, v))
        return RingFunction.apply(q, k, v).transpose(1, 2)

    return attend


def public(group, seq_len):
    """torch's documented use: attention inside its context manager, which also splits given buffers."""
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh("cpu", (dist.get_world_size(group),))

    def attend(q, k, v):
        q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, v))
        # Backward has to run inside as well. q, k and v are shards already; positions are not.
        ENTERED.enter_context(context_parallel(mesh, buffers=[torch.arange(seq_len)], buffer_seq_dims=[0]))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend

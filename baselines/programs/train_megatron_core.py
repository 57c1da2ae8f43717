"""Run by Megatron Core's interpreter: its GPT, tensor parallel over all ranks, one forward and backward.

`python train_megatron_core.py REQUEST.json`, one process per rank, with torchrun's variables. Each rank leaves its
parameters, their gradients, the loss, and the bytes it sent. Megatron asks for the current GPU when it makes rotary
tables; on CPU ranks the answer is the CPU.
"""

import json
import sys

from attention_bytes import counted
from program_parts import leave

sys.path[:1] = []  # the folder of this program

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402


def gpt(request):
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    size = dist.get_world_size()
    initialize_rng_tracker(inference_rng_tracker=True)  # the one that needs no GPU
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    config = TransformerConfig(
        num_layers=request["layers"],
        hidden_size=request["hidden"],
        ffn_hidden_size=request["ffn"],
        num_attention_heads=request["heads"],
        num_query_groups=request["kv_heads"],
        kv_channels=request["head_dim"],
        layernorm_epsilon=request["norm_eps"],
        tensor_model_parallel_size=size,
        use_cpu_initialization=True,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    torch.manual_seed(request["seed"])
    return GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=request["vocab"],
        max_sequence_length=request["seq_len"],
        position_embedding_type="rope",
        rotary_base=request["rope_base"],
        share_embeddings_and_output_weights=False,
    )


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    if not torch.cuda.is_available():
        torch.cuda.current_device = lambda: torch.device("cpu")
    dist.init_process_group("gloo")
    model = gpt(request)
    drawn = torch.load(request["inputs"])
    length = request["seq_len"]
    hidden = torch.ones(length, length, dtype=torch.bool).triu(1)[None, None]
    positions = torch.arange(length).expand(len(drawn), -1)
    with counted() as sent:
        loss = model(drawn[:, :-1], positions, hidden, labels=drawn[:, 1:].contiguous()).mean()
        loss.backward()
    kept = {
        "loss": [loss.item()],
        "parameters": {name: each.detach() for name, each in model.named_parameters()},
        "gradients": {name: each.grad for name, each in model.named_parameters()},
        "sent": sent,
    }
    torch.save(kept, f"{request['left']}.rank{dist.get_rank()}.pt")
    dist.barrier()
    leave()


main()

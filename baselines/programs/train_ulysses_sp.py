"""Run by DeepSpeed's interpreter: a Llama of transformers with UlyssesSPAttentionHF under ZeRO-3, in fp32.

`python train_ulysses_sp.py REQUEST.json`, one process per rank, with torchrun's variables. Rank 0 leaves the first
parameters, the gradients of the first step, and the loss of every step. `train_transformers.py` is the program that is
timed; this one keeps what can be compared.
"""

import json
import sys

from program_parts import leave, llama_config, register_ulysses

sys.path[:1] = []  # the folder of this program

import torch  # noqa: E402


def gathered(parameters, of):
    """A copy of what `of` gives for each parameter while all of them are whole."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(parameters.values())):
        return {name: of(parameter).detach().clone().float() for name, parameter in parameters.items()}


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    import deepspeed
    import deepspeed.comm as comm
    from deepspeed.utils import safe_get_full_grad
    from transformers import LlamaForCausalLM

    deepspeed.init_distributed("gloo")
    rank, size, length = comm.get_rank(), comm.get_world_size(), request["seq_len"]
    torch.manual_seed(request["seed"])
    config = llama_config(request)
    mpu = register_ulysses(config, request)
    settings = {
        "train_micro_batch_size_per_gpu": request["batch_size"],
        "train_batch_size": request["batch_size"],
        "steps_per_print": 1 << 30,
        "zero_optimization": {"stage": 3},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": request["learning_rate"], "betas": [0.9, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "sequence_parallel_size": size,
    }
    with deepspeed.zero.Init(config_dict_or_path=settings, mpu=mpu):
        model = LlamaForCausalLM(config)
    model.train()
    engine, *_ = deepspeed.initialize(config=settings, model=model, model_parameters=model.parameters(), mpu=mpu)
    named = dict(engine.module.named_parameters())
    first = gathered(named, lambda parameter: parameter)
    drawn = torch.load(request["inputs"])
    own = slice(rank * length // size, (rank + 1) * length // size)
    positions = torch.arange(length)[own].expand(len(drawn), -1)
    losses, gradients = [], {}
    for step in range(request["steps"]):
        logits = engine(input_ids=drawn[:, :-1][:, own], position_ids=positions, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), drawn[:, 1:][:, own].flatten())
        engine.backward(loss)
        if step == 0:  # every rank takes part
            gradients = {name: safe_get_full_grad(each).detach().clone().float() for name, each in named.items()}
        engine.step()
        mean = loss.detach().double()
        comm.all_reduce(mean)
        losses.append(mean.item() / size)
    if rank == 0:
        torch.save({"loss": losses, "parameters": first, "gradients": gradients}, f"{request['left']}.rank0.pt")
    comm.barrier()
    leave()


main()

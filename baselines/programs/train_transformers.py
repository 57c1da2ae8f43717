"""Run by the interpreter of a compared system: trains a model of transformers, under DeepSpeed, TRL or no trainer.

`python train_transformers.py REQUEST.json`, one process per rank, with torchrun's variables. The model starts from
random weights, under TRL and no trainer those with which burst starts, and learns the tokens of the trial's file. Rank
0 prints one line of JSON per step: seconds of the slowest rank, loss, norm.

`engine: deepspeed` is ZeRO-3 with ALST: UlyssesSPAttentionHF, the MLP and the loss in tiles, Liger-Kernel for the rest,
and with `offload` layers' inputs in host memory. With `left` in the request rank 0 leaves the first parameters, the
gradients of the first step and all losses (`burst setup baselines fidelity`).
`engine: trl` is TRL's SFT trainer with Liger-Kernel; it cannot split a sequence. `engine: plain` is a loop around the
model with Liger-Kernel, on one rank; its `weights` are fp32 under autocast to `products`, or bf16 themselves. Sequences
of `documents` are one packed row, or with `padded` a row each.
"""

import contextlib
import inspect
import json
import os
import sys
import time

from program_parts import (
    attention_name,
    batch,
    leave,
    load,
    model_class,
    model_config,
    register_ulysses,
    say,
    say_peaks,
)

sys.path[:1] = []  # the folder of this program

import torch  # noqa: E402


def with_kernel(request):
    """A block in which torch's attention prefers the trial's kernel."""
    if request["kernel"] != "cudnn":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(first, set_priority=True)


def start_as_ours(model, request):
    """Give the model the weights with which a trial of burst starts, so that losses can be compared step by step."""
    initialise = load(request["initial"]["file"])
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for name, tensor in request["initial"]["tensors"].items():
            whole = parameters[name]
            whole = whole.squeeze(1) if tensor["conv"] else whole
            rows = [part["rows"] // tensor["groups"] for part in tensor["parts"]]
            places = whole.unflatten(0, (tensor["groups"], -1)).split(rows, 1)  # of each part
            for place, part in zip(places, tensor["parts"], strict=True):
                drawn = torch.empty(part["rows"], *whole.shape[1:], dtype=whole.dtype, device=whole.device)
                initialise.fill(drawn, part["name"], request["seed"], part["std"], 0, len(drawn))
                place.copy_(drawn.view_as(place))


# What puts Liger's kernels into a model, by its type.
LIGER = {"llama": "apply_liger_kernel_to_llama", "qwen3_5_text": "apply_liger_kernel_to_qwen3_5"}


def take_liger(request, **parts):
    """Put Liger's kernels into the model's classes, without those of its parts that are given as False."""
    import liger_kernel.transformers

    getattr(liger_kernel.transformers, LIGER[request["config"]["model_type"]])(**parts)


def tile_mlp(tiles):
    """DeepSpeed's TiledMLP in the place of the model's MLP, as its documentation shows."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
    from transformers.models.llama import modeling_llama

    def compute(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def forward(self, x):
        weights = [self.down_proj.weight, self.gate_proj.weight, self.up_proj.weight]
        return TiledMLP.apply(compute, self, x, tiles, weights)

    modeling_llama.LlamaMLP.forward = forward


def train_with_deepspeed(request):
    import deepspeed
    import deepspeed.comm as comm
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss

    cuda = torch.cuda.is_available()
    deepspeed.init_distributed("nccl" if cuda else "gloo")
    rank, world, cp_size = comm.get_rank(), comm.get_world_size(), request["cp_size"]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(request["seed"])
    if cuda:  # its kernels are of GPUs; loss and MLP in tiles are DeepSpeed's
        take_liger(request, swiglu=request["mlp_tiles"] == 1, fused_linear_cross_entropy=False)
    if request["mlp_tiles"] > 1:
        tile_mlp(request["mlp_tiles"])
    config = model_config(request)
    mpu = register_ulysses(config, request)
    with deepspeed.zero.Init(config_dict_or_path=request["deepspeed"], mpu=mpu):
        model = model_class(request)(config)
    if request["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(
        config=request["deepspeed"], model=model, model_parameters=model.parameters(), mpu=mpu
    )
    named = dict(engine.module.named_parameters())
    left = {"loss": [], "parameters": whole_parameters(named)} if "left" in request else None
    replica, part, length = rank // cp_size, rank % cp_size, request["seq_len"] // cp_size
    own = slice(part * length, (part + 1) * length)
    positions = torch.arange(request["seq_len"], device=device)[own].expand(request["batch_size"], -1)

    moved = contextlib.nullcontext()
    if request["offload"]:
        from deepspeed.runtime.activation_checkpointing import offload_activations

        moved = offload_activations.get_checkpoint_hidden_states_offloading_ctx_manager()

    def tile_loss(head, hidden, targets):  # [tokens, hidden] and [tokens]
        return torch.nn.functional.cross_entropy(head(hidden).float(), targets)

    for step in range(request["steps"]):
        inputs, targets = (each[:, own].to(device) for each in batch(request, step, replica, world // cp_size))
        comm.barrier()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        module = engine.module
        with moved:
            hidden = module.model(input_ids=inputs, position_ids=positions, use_cache=False).last_hidden_state
            head = module.lm_head
            loss = TiledFusedLogitsLoss.apply(
                tile_loss, head, hidden, targets, None, request["loss_tiles"], [head.weight], "mean"
            )
            engine.backward(loss)
        if request["offload"]:
            check_moved(moved.stats, config.num_hidden_layers, cuda)
        if left and step == 0:
            left["gradients"] = whole_gradients(named)
        engine.step()
        if cuda:
            torch.cuda.synchronize()
        figures = torch.tensor([time.perf_counter() - start, loss.item()], dtype=torch.float64, device=device)
        slowest, mean = figures[:1].clone(), figures[1:].clone()
        comm.all_reduce(slowest, op=comm.ReduceOp.MAX)
        comm.all_reduce(mean)
        norm = engine.get_global_grad_norm()
        line = {"step": step + 1, "seconds": slowest.item(), "loss": mean.item() / world}
        say(rank, **line, **({} if norm is None else {"grad_norm": float(norm)}))
        if left:
            left["loss"].append(line["loss"])
    if left and rank == 0:
        torch.save(left, f"{request['left']}.rank0.pt")
    finish(rank, world)


def check_moved(stats, layers, cuda):
    """End the trial where DeepSpeed left inputs of layers on the GPU, which it does without a word where it does not
    know a model's layers. The last one's stays; those of CPU ranks are looked at and left where they are."""
    found, expected = (stats.offloaded_tensors, layers - 1) if cuda else (stats.skipped_marked_tensors, layers)
    if found != expected:
        sys.exit(f"DeepSpeed moved inputs of {found} layers, expected {expected}; leave checkpoint.upstream out")


def whole_parameters(named):
    """Copies in fp32 of parameters that ZeRO-3 has split. Collective."""
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(named.values())):
        return {name: each.detach().clone().float() for name, each in named.items()}


def whole_gradients(named):
    """Copies in fp32 of their gradients. Collective."""
    from deepspeed.utils import safe_get_full_grad

    return {name: safe_get_full_grad(each).detach().clone().float() for name, each in named.items()}


def train_with_trl(request):
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rank, world, cuda = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    torch.manual_seed(request["seed"])
    config = model_config(request)
    model = model_class(request)._from_config(config, attn_implementation=attention_name(request))
    start_as_ours(model.to("cuda") if cuda else model, request)  # generators of CPUs draw other numbers
    unused = "t0"
    names = {f"t{number}": number for number in range(request["vocab"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(names, unused)), pad_token=unused, eos_token=unused
    )
    rows = request["batch_size"] * world * request["steps"]
    sequences = [batch(request | {"batch_size": 1}, row, 0, 1)[0][0].tolist() for row in range(rows)]
    # With a name, because the library would otherwise hash all of it to make one.
    data = Dataset(InMemoryTable.from_pydict({"input_ids": sequences}), fingerprint="trial")

    class StepPrinter(TrainerCallback):
        """Prints each step; the trainer logs after it, so that loss and norm are there."""

        start = 0.0

        def wait(self):
            if cuda:
                torch.cuda.synchronize()

        def on_step_begin(self, *arguments, **more):
            self.wait()
            self.start = time.perf_counter()

        def on_step_end(self, *arguments, **more):
            self.wait()
            self.seconds = time.perf_counter() - self.start

        def on_log(self, arguments, state, control, logs=None, **more):
            if logs and "loss" in logs:
                say(rank, step=state.global_step, seconds=self.seconds, loss=logs["loss"], grad_norm=logs["grad_norm"])

    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir=request["output"],
            per_device_train_batch_size=request["batch_size"],
            max_steps=request["steps"],
            max_length=request["seq_len"],
            learning_rate=request["learning_rate"],
            lr_scheduler_type="constant",
            bf16=True,
            optim="adamw_torch_fused",
            adam_beta2=0.95,
            weight_decay=0.1,
            use_liger_kernel=cuda,  # its kernels are of GPUs
            use_cpu=not cuda,
            gradient_checkpointing=request["recompute"],
            activation_offloading=request["offload"],
            gradient_checkpointing_kwargs={"use_reentrant": False},
            logging_steps=1,
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            report_to=[],
            save_strategy="no",
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
            seed=request["seed"],
        ),
        train_dataset=data,
        processing_class=tokenizer,
        callbacks=[StepPrinter()],
    )
    trainer.train()
    finish(rank, world)


def packed(request, inputs, targets):
    """Arguments of the model for documents one after another in one row; without any, for the rows as they are."""
    lengths = request["documents"] * len(inputs)
    if not lengths:
        return {"input_ids": inputs, "shift_labels": targets}
    positions = torch.cat([torch.arange(length, device=inputs.device) for length in lengths])
    given = {"input_ids": inputs.view(1, -1), "shift_labels": targets.view(1, -1), "position_ids": positions[None]}
    if request["kernel"] == "fa4":  # otherwise each layer would find them in the positions
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(inputs.device, torch.int32)
        given |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        given |= {"max_length_q": max(lengths), "max_length_k": max(lengths)}
    return given


def padded(request, inputs, targets):
    """Arguments of the model for one document per row, of the length of the longest."""
    lengths = (request["documents"] or [request["seq_len"]]) * len(inputs)
    documents, labels = (
        torch.nn.utils.rnn.pad_sequence(each.reshape(-1).split(lengths), batch_first=True, padding_value=padding)
        for each, padding in ((inputs, 0), (targets, -100))
    )
    real = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    return {"input_ids": documents, "shift_labels": labels, "attention_mask": real.to(inputs.device, torch.long)}


def linear_kernel(model):
    """What computes the recurrence of linear layers: `fla` where transformers found flash-linear-attention when it was
    imported, else `torch`. transformers has no call that says so. None where there are no such layers."""
    rule = getattr(sys.modules[type(model).__module__], "torch_chunk_gated_delta_rule", None)
    if rule is None:
        return None
    found = inspect.getclosurevars(rule).nonlocals["implementation"]
    return "fla" if inspect.unwrap(found).__module__.partition(".")[0] == "fla" else "torch"


def train_plain(request):
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(request["seed"])
    if cuda:  # its kernels are of GPUs
        take_liger(request)
    else:  # so are flash-linear-attention's, which transformers takes wherever they are installed
        sys.modules["fla"] = None
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16}
    weights, products = dtypes[request["weights"]], dtypes[request["products"]]
    with device:
        model = model_class(request)._from_config(
            model_config(request), attn_implementation=attention_name(request), dtype=weights
        )
    start_as_ours(model, request)
    if kernel := linear_kernel(model):
        say(0, chosen={"linear_kernel": kernel})
    if request["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    matrices, norms = ([each for each in model.parameters() if (each.ndim > 1) is wide] for wide in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=request["learning_rate"], betas=(0.9, 0.95), fused=cuda)

    def wait():
        if cuda:
            torch.cuda.synchronize()

    arranged = padded if request["padded"] else packed
    for step in range(request["steps"]):
        given = arranged(request, *(each.to(device) for each in batch(request, step, 0, 1)))
        wait()
        start = time.perf_counter()
        with torch.autocast(device.type, products, enabled=products != weights):
            # Both losses, Liger's and transformers' own, take labels that are shifted already: none is left out.
            loss = model(labels=given["shift_labels"], use_cache=False, **given).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        wait()
        say(0, step=step + 1, seconds=time.perf_counter() - start, loss=loss.item(), grad_norm=norm.item())
    finish(0, 1)


def finish(rank, world):
    """Rank 0 prints the ranks' peaks; the process ends."""
    import torch.distributed as dist

    say_peaks(rank, world)
    if world > 1:
        dist.barrier()
    leave()


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        REQUEST = json.load(file)
    with with_kernel(REQUEST):
        {"deepspeed": train_with_deepspeed, "trl": train_with_trl, "plain": train_plain}[REQUEST["engine"]](REQUEST)

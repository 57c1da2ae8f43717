"""Run by the interpreter of a compared system: trains a Llama of transformers, under DeepSpeed or TRL.

`python train_transformers.py REQUEST.json`, one process per rank, with torchrun's variables. The model starts from
random weights, and learns the tokens of the trial's file. Rank 0 prints one line of JSON per step: seconds of the
slowest rank, loss, norm.

`engine: deepspeed` is ZeRO-3 with ALST: UlyssesSPAttentionHF, the MLP and the loss in tiles. `engine: trl` is TRL's SFT
trainer with Liger-Kernel; it cannot split a sequence.
"""

import contextlib
import json
import os
import sys
import time

sys.path[:1] = []  # the folder of this program

import torch  # noqa: E402

MARK = "UPSTREAM "


def say(rank, **line):
    if rank == 0:
        print(MARK + json.dumps(line), flush=True)


def model_config(request):
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=request["vocab"],
        hidden_size=request["hidden"],
        intermediate_size=request["ffn"],
        num_hidden_layers=request["layers"],
        num_attention_heads=request["heads"],
        num_key_value_heads=request["kv_heads"],
        head_dim=request["head_dim"],
        max_position_embeddings=request["seq_len"],
        rms_norm_eps=request["norm_eps"],
        rope_theta=request["rope_base"],
        tie_word_embeddings=False,
        use_cache=False,
    )


def batch(request, step, replica, replicas):
    """Whole sequences of one step and replica from the trial's file of tokens: inputs, and the next tokens."""
    size, length = request["batch_size"], request["seq_len"]
    first = (step * replicas + replica) * size
    with open(request["tokens"], "rb") as file:
        file.seek(4 * first * length)
        run = torch.frombuffer(bytearray(file.read(4 * (size * length + 1))), dtype=torch.int32).long()
    return run[:-1].view(size, length), run[1:].view(size, length)


def attention_name(request):
    """Of transformers' attention functions."""
    return "flash_attention_4" if request["kernel"] == "fa4" else "sdpa"


def with_kernel(request):
    """A block in which torch's attention prefers the trial's kernel."""
    if request["kernel"] != "cudnn":
        return contextlib.nullcontext()
    from torch.nn.attention import SDPBackend, sdpa_kernel

    first = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(first, set_priority=True)


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
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledFusedLogitsLoss, UlyssesSPAttentionHF
    from transformers import LlamaForCausalLM

    cuda = torch.cuda.is_available()
    deepspeed.init_distributed("nccl" if cuda else "gloo")
    rank, world, cp_size = comm.get_rank(), comm.get_world_size(), request["cp_size"]
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    torch.manual_seed(request["seed"])
    if request["mlp_tiles"] > 1:
        tile_mlp(request["mlp_tiles"])
    config = model_config(request)
    config._attn_implementation = attention_name(request)
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model_name_or_path=type("Model", (), {"config": config}),
        core_attn_implementation=attention_name(request),
        sequence_parallel_size=cp_size,
        micro_batch_size=request["batch_size"],
        seq_length=request["seq_len"],
        seq_length_is_variable=False,
    )
    with deepspeed.zero.Init(config_dict_or_path=request["deepspeed"], mpu=mpu):
        model = LlamaForCausalLM(config)
    if request["recompute"]:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    engine, *_ = deepspeed.initialize(
        config=request["deepspeed"], model=model, model_parameters=model.parameters(), mpu=mpu
    )
    replica, part, length = rank // cp_size, rank % cp_size, request["seq_len"] // cp_size
    own = slice(part * length, (part + 1) * length)
    positions = torch.arange(request["seq_len"], device=device)[own].expand(request["batch_size"], -1)

    def tile_loss(head, hidden, targets):  # [tokens, hidden] and [tokens]
        return torch.nn.functional.cross_entropy(head(hidden).float(), targets)

    for step in range(request["steps"]):
        inputs, targets = (each[:, own].to(device) for each in batch(request, step, replica, world // cp_size))
        comm.barrier()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        module = engine.module
        hidden = module.model(input_ids=inputs, position_ids=positions, use_cache=False).last_hidden_state
        head = module.lm_head
        loss = TiledFusedLogitsLoss.apply(
            tile_loss, head, hidden, targets, None, request["loss_tiles"], [head.weight], "mean"
        )
        engine.backward(loss)
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
    peaks(rank, world)


def train_with_trl(request):
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from tokenizers import Tokenizer, models
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    rank, world, cuda = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()
    torch.manual_seed(request["seed"])
    model = LlamaForCausalLM._from_config(model_config(request), attn_implementation=attention_name(request))
    unused = "t0"
    names = {f"t{number}": number for number in range(request["vocab"])}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(names, unused)), pad_token=unused, eos_token=unused
    )
    rows = request["batch_size"] * world * request["steps"]
    sequences = [batch(request | {"batch_size": 1}, row, 0, 1)[0][0].tolist() for row in range(rows)]
    # With a name, because the library would otherwise hash all of it to make one.
    data = Dataset(InMemoryTable.from_pydict({"input_ids": sequences}), fingerprint="trial")

    class Clock(TrainerCallback):
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
        callbacks=[Clock()],
    )
    trainer.train()
    peaks(rank, world)


def peaks(rank, world):
    """Each rank's peak of the allocator, printed by rank 0; the process ends then."""
    import torch.distributed as dist

    cuda = torch.cuda.is_available()
    own = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()] if cuda else []
    gathered = [own] * world
    if world > 1:
        dist.all_gather_object(gathered, own)
    allocated, reserved = ([each[kind] for each in gathered] if cuda else [] for kind in (0, 1))
    say(rank, peak_allocated_bytes=allocated, peak_reserved_bytes=reserved)
    if world > 1:
        dist.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not by returning: a thread of gloo that drops tensors while the interpreter ends aborts the process.
    os._exit(0)


if __name__ == "__main__":
    with open(sys.argv[1], encoding="utf-8") as file:
        REQUEST = json.load(file)
    with with_kernel(REQUEST):
        {"deepspeed": train_with_deepspeed, "trl": train_with_trl}[REQUEST["engine"]](REQUEST)

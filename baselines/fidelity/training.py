"""Training steps of systems on CPU ranks, beside our model in float64 on one process, from the same parameters.

A program leaves the parameters it began with, the loss of each step, and the gradients of the first. The reference
takes those parameters, so initialisations need not agree; losses of several steps agree only where gradients and
optimizer do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from baselines.called import REQUEST_FILE, render_program, training_request
from baselines.deepspeed import METHOD as DEEPSPEED
from baselines.fidelity.attention import error_of, run_ranks
from baselines.fidelity.cases import TrainingCase, TrainingSystem
from baselines.fidelity.table import FidelityError, Row, verdict_of
from baselines.install.places import InstallPlace
from engine.models.architecture import architecture_named
from engine.settings import Checkpoint, Steps, TrialSettings
from engine.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

_SECONDS = 280.0
SHAPE = ModelShape(name="fidelity", layers=2, hidden=64, ffn=96, heads=8, kv_heads=4, head_dim=8, vocab=128)
_SEQ_LEN, _BATCH, _LEARNING_RATE = 64, 2, 1e-3

Tensors = dict[str, "Tensor"]


def training_rows(
    name: str, system: TrainingSystem, cases: Sequence[TrainingCase], place: InstallPlace, release: str, scratch: Path
) -> list[Row]:
    """A row for each case; see `baselines.fidelity.attention.attention_rows`."""
    import torch

    scratch.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(0, SHAPE.vocab, (_BATCH, _SEQ_LEN + 1), generator=generator)
    torch.save(drawn, scratch / "tokens.pt")
    rows = []
    for case in cases:
        row = Row(
            system=system.title, release=release, case=case.name, form=case.form, kernel=system.kernel,
            ranks=case.ranks, dtype="fp32", heads=SHAPE.heads, kv_heads=SHAPE.kv_heads, verdict="fails",
            reproduce=f"burst setup baselines fidelity {name} --case {case.name}",
        )  # fmt: skip
        ended = _run(system, case, place, scratch)
        paths = [scratch / f"{case.name}.rank{rank}.pt" for rank in range(case.ranks)]
        left = [torch.load(path) for path in paths if path.exists()]
        rows.append(_compared(row, system, left, drawn) if left and not ended else replace(row, found=ended))
    return rows


def _run(system: TrainingSystem, case: TrainingCase, place: InstallPlace, scratch: Path) -> str:
    """Run the system's program; see `run_ranks`."""
    settings = TrialSettings(
        task="train", method=system.package, model=SHAPE, seq_len=_SEQ_LEN, batch_size=_BATCH, cp_size=case.ranks,
        dtype="fp32", checkpoint=Checkpoint(every=0), learning_rate=_LEARNING_RATE,
        steps=Steps(warmup=0, measured=system.steps),
    )  # fmt: skip
    if system.package == DEEPSPEED.package:
        request = DEEPSPEED.training(settings, scratch)
    else:
        request = training_request(settings, system.steps, scratch)
    request |= {"inputs": str(scratch / "tokens.pt"), "left": str(scratch / case.name)}
    folder = scratch / f"{case.name}.ranks"
    folder.mkdir(parents=True, exist_ok=True)
    rendered = render_program(system.program, request, folder, place)
    (folder / REQUEST_FILE).write_text(rendered.files[REQUEST_FILE], encoding="utf-8")
    return run_ranks(rendered.command, rendered.environment, case.ranks, folder, _SECONDS)


def _compared(row: Row, system: TrainingSystem, left: Sequence[Mapping[str, Any]], drawn: Tensor) -> Row:
    """The row with the errors of loss and gradients."""
    import torch

    names = _NAMES[system.names]
    losses, gradients = reference(names(left, "parameters"), drawn, system.steps)
    found = names(left, "gradients")
    flat = [torch.cat([one[name].double().flatten() for name in gradients]) for one in (found, gradients)]
    apart = abs(left[0]["loss"][-1] - losses[-1])
    errors = {
        "loss": FidelityError(relative=apart / abs(losses[-1]), largest=apart),
        "gradients": error_of(flat[0], flat[1]),
    }
    verdict, sentence = verdict_of(errors, row.dtype)
    sent = max(sum(each["sent"].values()) for each in left) if "sent" in left[0] else None
    return replace(
        row,
        verdict=verdict,
        found=sentence,
        errors=errors,
        loss=left[0]["loss"][-1],
        loss_expected=losses[-1],
        sent_bytes=sent,
    )


def reference(parameters: Tensors, drawn: Tensor, steps: int) -> tuple[list[float], Tensors]:
    """Losses of `steps` steps of our model in float64 on one process, and the gradients of the first, by our names."""
    import torch

    from engine.models.decoder import Decoder

    model = Decoder(SHAPE).double()
    model.load_state_dict({name: tensor.double() for name, tensor in parameters.items()})
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.1)
    positions, targets = torch.arange(_SEQ_LEN), drawn[:, 1:]
    losses, gradients = [], {}
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(drawn[:, :-1], positions, targets) / targets.numel()
        loss.backward()
        if step == 0:
            gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # as the systems do
        optimizer.step()
        losses.append(loss.item())
    return losses, gradients


def _from_hugging_face(left: Sequence[Mapping[str, Any]], kind: Literal["parameters", "gradients"]) -> Tensors:
    """Our names for those of transformers; rank 0 left all of them whole."""
    stored_name = architecture_named(SHAPE.architecture).stored_name
    return {name: left[0][kind][stored_name(name, SHAPE)] for name in SHAPE.parameter_sizes()}


def _from_megatron(left: Sequence[Mapping[str, Any]], kind: Literal["parameters", "gradients"]) -> Tensors:
    """Our names and whole tensors, from the parts of Megatron's tensor-parallel ranks.

    Its QKV weight has, for each KV head, the query heads of that group, then K, then V; its first MLP weight has on
    each rank the gate's rows, then the other ones.
    """
    import torch

    def joined(name: str, dim: int) -> Tensor:
        return torch.cat([each[kind][name] for each in left], dim)

    queries, size = SHAPE.heads // SHAPE.kv_heads, SHAPE.head_dim
    whole: Tensors = {
        "embedding.weight": joined("embedding.word_embeddings.weight", 0),
        "norm.weight": left[0][kind]["decoder.final_layernorm.weight"],
        "head.weight": joined("output_layer.weight", 0),
    }
    for layer in range(SHAPE.layers):
        theirs, ours = f"decoder.layers.{layer}.", f"blocks.{layer}."
        qkv = joined(theirs + "self_attention.linear_qkv.weight", 0)
        groups = qkv.unflatten(0, (SHAPE.kv_heads, queries + 2, size))
        for name, heads in (("q", groups[:, :queries]), ("k", groups[:, queries]), ("v", groups[:, queries + 1])):
            whole[f"{ours}attention.{name}.weight"] = heads.reshape(-1, SHAPE.hidden)
        gates = [each[kind][theirs + "mlp.linear_fc1.weight"].chunk(2) for each in left]
        whole |= {
            ours + "attention_norm.weight": left[0][kind][theirs + "input_layernorm.weight"],
            ours + "attention.output.weight": joined(theirs + "self_attention.linear_proj.weight", 1),
            ours + "mlp_norm.weight": left[0][kind][theirs + "pre_mlp_layernorm.weight"],
            ours + "mlp.gate.weight": torch.cat([gate for gate, _ in gates]),
            ours + "mlp.up.weight": torch.cat([up for _, up in gates]),
            ours + "mlp.down.weight": joined(theirs + "mlp.linear_fc2.weight", 1),
        }
    return whole


_NAMES = {"hugging_face": _from_hugging_face, "megatron": _from_megatron}

"""What one rank does with a case: calls the target's functions and returns what they gave, whole.

An answer is a list of results, each tensors by name in float64 on the CPU, and facts: the tokens that this rank holds,
inputs that changed, bytes sent. Numbers are not judged here (`compare.py`), but a value that a function may not return
ends the case. Shape letters as in `reference.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from numbers import Real

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from conform import reference
from conform.cases import ConformCase
from conform.target import IGNORE, CaseProblem, LoadedTarget

LOUD = 1000.0  # what a token becomes whose change others may not see


@dataclass(slots=True, kw_only=True)
class RankAnswer:
    """Of one rank: results in the order of `compare.expected`, and facts beside them."""

    results: list[dict[str, Tensor]] = field(default_factory=list)
    held: list[int] = field(default_factory=list)  # positions of this rank's tokens; none where they are not known
    changed: list[str] = field(default_factory=list)  # inputs that a call overwrote
    sent: dict[str, int] = field(default_factory=dict)  # bytes: `counted` and `claimed`


def answer(target: LoadedTarget, case: ConformCase, device: str) -> RankAnswer:
    """Ask the target on this rank, with tensors on the device, cpu or cuda. Collective over the default group.

    Raises whatever the target raises, and TypeError or ValueError for what none of its functions may return.
    """
    problem = replace(
        case.problem,
        device=device,
        ranks=dist.get_world_size(),
        rank=dist.get_rank(),
        group=dist.group.WORLD,
    )
    ask = _training if case.kind == "training" else _calls
    return ask(target, problem, case.way)


def rewritten(tensors: Mapping[str, Tensor], token: int) -> dict[str, Tensor]:
    """The same inputs of a call, but for one token, whose key and value are large."""
    found = {name: each.clone() for name, each in tensors.items()}
    for name in ("q", "k", "v"):
        found[name][:, token] = LOUD * torch.sign(found[name][:, token] + 0.5)
    return found


def changed_token(problem: CaseProblem) -> int:
    """In the middle of the sequence, where no rank's part begins; of several documents in the last but one."""
    if len(problem.documents) < 2:
        return min(problem.tokens // 2 + 1, problem.tokens - 1)
    return sum(problem.documents[:-1]) - 1


def other_length(problem: CaseProblem) -> CaseProblem:
    """A shorter problem in between: half the tokens, and one document less than half of them."""
    half = max(problem.tokens // 2, 1)
    documents = (half // 4, half - half // 4) if problem.documents and half >= 4 else ()
    return replace(problem, tokens=half, documents=documents, seed=problem.seed + 7)


def _tensor(found: object, function: str) -> Tensor:
    """What a function of the target returned, where that is a tensor. Raises TypeError where it is none."""
    if not isinstance(found, Tensor):
        raise TypeError(f"{function} returned {type(found).__name__}, expected a tensor; correct it in the target file")
    return found


def _kept(tensor: Tensor) -> Tensor:
    """A copy in float64 on the CPU, which the judge compares."""
    return tensor.detach().double().cpu().clone()


# Attention and recurrences


@dataclass(slots=True)
class _Call:
    """One call of a target, whose backward may come later."""

    problem: CaseProblem
    inputs: dict[str, Tensor]
    before: dict[str, Tensor]  # copies from before the call
    out: Tensor
    dout: Tensor


class _CalledTarget:
    def __init__(self, target: LoadedTarget) -> None:
        self._shard, self._gather = target.function("shard"), target.function("gather")
        self._kind, self._function = target.kind, target.function(target.kind)

    def call(self, problem: CaseProblem, tensors: Mapping[str, Tensor], *, strided: bool = False) -> _Call:
        sinks = tensors.get("sinks")
        if sinks is not None:
            problem = replace(problem, sinks_N=sinks.clone().requires_grad_("sinks" not in problem.frozen))
        inputs = {}
        for name in reference.inputs_of(problem):
            part = self._part(tensors[name], problem)
            if strided:  # heads before tokens in memory, as a projection leaves them in some models
                part = part.transpose(1, 2).contiguous().transpose(1, 2)
            inputs[name] = part.clone(memory_format=torch.preserve_format).requires_grad_(name not in problem.frozen)
        before = {name: each.detach().clone() for name, each in inputs.items()}
        gates = (inputs.get("decay"), inputs.get("beta")) if problem.recurrence else ()
        out = _tensor(self._function(inputs["q"], inputs["k"], inputs["v"], *gates, problem), self._kind)
        expected = [*inputs["q"].shape[:2], problem.heads, inputs["v"].shape[-1]]
        if list(out.shape) != expected:
            raise ValueError(
                f"{self._kind} returned the shape {list(out.shape)}, expected {expected}: "
                "[batch, tokens, heads, head dim of v]; correct it in the target file"
            )
        return _Call(problem, inputs, before, out, self._part(tensors["dout"], problem))

    def _part(self, whole: Tensor, problem: CaseProblem) -> Tensor:
        """This rank's tokens of a tensor that is whole."""
        return _tensor(self._shard(whole.clone(), 1, problem), "shard").detach()

    def result(self, call: _Call, *, expanded: bool = False) -> dict[str, Tensor]:
        """out and the gradients, whole, after the backward."""
        dout = call.dout
        if expanded:  # the gradient of a sum over head_dim: one number for all of a head
            dout = dout[..., :1].expand_as(dout)
        if not call.out.requires_grad:
            raise ValueError(
                f"{self._kind} returned an output without a gradient, expected one that is differentiable in its "
                "inputs; leave out detach and no_grad in the target file"
            )
        call.out.backward(dout)
        parts = {"out": call.out.detach()}
        for name, each in call.inputs.items():
            if each.requires_grad:
                parts[f"d{name}"] = torch.zeros_like(each) if each.grad is None else each.grad
        whole = {name: _tensor(self._gather(part, 1, call.problem), "gather") for name, part in parts.items()}
        whole = {name: _kept(reference.with_rows(each)) for name, each in whole.items()}
        sinks = call.problem.sinks_N
        if sinks is not None and sinks.requires_grad:
            grad = torch.zeros_like(sinks) if sinks.grad is None else sinks.grad
            dist.all_reduce(grad)
            whole["dsinks"] = _kept(grad)
        return whole

    def held(self, problem: CaseProblem) -> list[int]:
        """Positions of this rank's tokens."""
        count = torch.arange(1, problem.tokens + 1, dtype=torch.float32, device=problem.device)
        part = self._part(count[None, :, None, None], problem)
        return [int(each) - 1 for each in part.flatten().tolist() if each > 0.5]  # padding is 0


def _calls(target: LoadedTarget, problem: CaseProblem, way: str) -> RankAnswer:
    asked = _CalledTarget(target)
    first, second = reference.call_tensors(problem, 2)
    found = RankAnswer(held=asked.held(problem))
    if way in ("again", "after_no_grad"):
        if way == "again":
            moved = replace(problem, documents=problem.documents[::-1])  # as boundaries differ from batch to batch
            asked.result(asked.call(moved, second))
            other = other_length(problem)
            asked.result(asked.call(other, reference.call_tensors(other)[0]))
        else:
            with torch.no_grad():
                asked.call(problem, second)
        found.results = [asked.result(asked.call(problem, first))]
    elif way == "crossed":
        one, two = asked.call(problem, first), asked.call(problem, second)
        found.results = [asked.result(one), asked.result(two)]
    elif way == "repeated":
        found.results = [asked.result(asked.call(problem, first)) for _ in range(2)]
    elif way == "leak":
        quiet = asked.result(asked.call(problem, first))
        loud = asked.call(problem, rewritten(first, changed_token(problem)))
        found.results = [quiet, {"out": asked.result(loud)["out"]}]
    elif way == "kept":
        call = asked.call(problem, first)
        before = call.before | {"dout": call.dout.clone()}
        found.results = [asked.result(call)]
        after = call.inputs | {"dout": call.dout}
        found.changed = [name for name, each in before.items() if not torch.equal(each, after[name])]
    elif way == "bytes":
        with _SentBytes() as sent:
            call = asked.call(problem, first)
            call.out.backward(call.dout)
        found.results = [asked.result(asked.call(problem, first))]
        found.sent = {"counted": sent.bytes, "claimed": int(target.function("sent_bytes")(problem))}
    else:
        strided = way == "strided"
        found.results = [asked.result(asked.call(problem, first, strided=strided), expanded=strided)]
    return found


class _SentBytes(TorchDispatchMode):
    """Bytes that this rank hands to collectives and sends of torch.distributed within the context. What `shard` sends
    counts too."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        space, _, name = func.name().partition("::")
        if space == "c10d":
            self.bytes += _bytes_of(name, args)
        return func(*args, **(kwargs or {}))


def _bytes_of(name: str, args: tuple[object, ...]) -> int:
    """Of one operator: what leaves this rank, as the best algorithm would send it."""
    ranks = dist.get_world_size()
    given: object = args[0]
    if name.startswith(("allgather", "_allgather", "alltoall", "reduce_scatter", "_reduce_scatter")):
        given = args[1]
    sizes = sum(each.numel() * each.element_size() for each in _tensors(given))
    if name == "send":
        return sizes
    if name.startswith(("allgather", "_allgather")):
        return sizes * (ranks - 1)
    if name.startswith(("alltoall", "reduce_scatter", "_reduce_scatter")):
        return sizes * (ranks - 1) // ranks
    return 2 * sizes * (ranks - 1) // ranks if name.startswith("allreduce") else 0


def _tensors(given: object) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    return [each for part in given for each in _tensors(part)] if isinstance(given, list | tuple) else []


# Training


def _training(target: LoadedTarget, problem: CaseProblem, way: str) -> RankAnswer:
    make_model, shard = target.function("make_model"), target.function("shard")
    step, gather = target.function("step"), target.function("gather")
    device, dtype = problem.device, problem.torch_dtype
    found = RankAnswer()

    def fresh(seed: int = 0) -> tuple[object, CaseProblem]:
        of_seed = replace(problem, seed=problem.seed + seed)
        state = {name: each.to(device, dtype) for name, each in reference.weights(of_seed).items()}
        of_seed = replace(of_seed, state=state)
        return make_model(of_seed), of_seed

    def stepped(model: object, asked: CaseProblem, data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        parts = [shard({name: each.clone() for name, each in batch.items()}, asked) for batch in data]
        if not found.held and isinstance(parts[0], Mapping) and isinstance(parts[0].get("input_ids"), Tensor):
            found.held = parts[0]["input_ids"].flatten().tolist()
        loss = _loss(step(model, parts, asked), "step")
        gradients = gather(model, asked)
        if not isinstance(gradients, Mapping):
            raise TypeError(
                f"gather returned {type(gradients).__name__}, expected a dictionary of gradients by parameter; "
                "correct it in the target file"
            )
        return {"loss": loss} | {name: _kept(_tensor(each, f"gather[{name!r}]")) for name, each in gradients.items()}

    def evaluated(model: object, asked: CaseProblem, data: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        part = shard({name: each.clone() for name, each in data[0].items()}, asked)
        return {"loss": _loss(target.function("evaluate")(model, part, asked), "evaluate")}

    model, asked = fresh()
    data = reference.batches(asked)
    if way == "steps":
        other = other_length(asked)
        stepped(model, other, reference.batches(other))
        found.results = [stepped(model, asked, data)]
    elif way == "evaluated":
        found.results = [evaluated(model, asked, data), stepped(model, asked, data), evaluated(model, asked, data)]
    elif way == "models":
        second, of_second = fresh(5)
        stepped(second, of_second, reference.batches(of_second))
        first_result = stepped(model, asked, data)
        stepped(second, of_second, reference.batches(of_second))
        found.results = [first_result, stepped(model, asked, data)]
    elif way == "rewritten":
        found.results = [stepped(model, asked, each) for each in company(asked)]
    elif way == "same":
        found.results = [stepped(model, asked, data) for _ in range(2)]
    else:
        found.results = [stepped(model, asked, data)]
    return found


def _loss(found: object, function: str) -> Tensor:
    """A loss that is a number or a tensor of one. Raises TypeError for anything else."""
    if isinstance(found, Tensor) and found.numel() == 1:
        return _kept(found).reshape(())
    if isinstance(found, Real):
        return torch.tensor(float(found), dtype=torch.float64)
    shape = f" of shape {list(found.shape)}" if isinstance(found, Tensor) else ""
    raise TypeError(
        f"{function} returned {type(found).__name__}{shape}, expected the loss as one number; correct it in the target "
        "file"
    )


def company(problem: CaseProblem) -> list[list[dict[str, Tensor]]]:
    """Two steps in which one document alone has labels, the longest; the tokens of the others differ."""
    [first] = reference.batches(problem)
    longest = max(range(len(problem.documents)), key=lambda at: problem.documents[at])
    start = sum(problem.documents[:longest])
    place_S = torch.arange(problem.tokens, device=first["labels"].device)
    own_S = (place_S >= start) & (place_S < start + problem.documents[longest])
    first["labels"] = first["labels"].masked_fill(~own_S, IGNORE)
    second = dict(first)
    second["input_ids"] = torch.where(own_S, first["input_ids"], (first["input_ids"] + 1) % problem.vocab)
    return [[first], [second]]

"""What a target is asked: a table of cases. The source of each is a public thread, or a fault that the case finds.

A case is a problem and a way to ask it. `needs` follow from the problem, so that no case forgets one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conform.target import CaseProblem

# How a problem is asked.
WAYS = {
    # of attention
    "once": "one call and its backward",
    "again": "a call of the same shape with other numbers and boundaries before it, and one of another length",
    "crossed": "two calls, then the backward of the first, then that of the second",
    "after_no_grad": "a call without gradients before it",
    "strided": "q, k and v are views that are not contiguous, and the gradient of the output is expanded",
    "kept": "the inputs are the same after the call",
    "leak": "one token changes: no earlier token's output may change, and none of another document",
    "repeated": "the same call twice gives the same bits",
    "bytes": "a rank sends what the target claims",
    # of training
    "step": "one step",
    "steps": "two steps of one model; the second is compared",
    "evaluated": "the loss without gradients, before and after a step",
    "models": "two models take steps in turn; the first is compared",
    "rewritten": "the tokens of other documents change: the loss of one document may not",
    "same": "the same step twice gives the same bits",
}
TRAINING_WAYS = ("step", "steps", "evaluated", "models", "rewritten", "same")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConformCase:
    """One question. `source` is owner/repository#number of a public thread, or "fault: ..."."""

    name: str
    problem: CaseProblem
    source: str
    way: str = "once"
    quick: bool = False  # part of the quick form

    @property
    def kind(self) -> str:
        """attention or training."""
        return "training" if self.way in TRAINING_WAYS else "attention"

    def needs(self, ranks: int) -> frozenset[str]:
        """Capabilities that a target has to claim for this case on so many ranks."""
        asked, way = self.problem, self.way
        found = {
            asked.mask: True,
            "documents": bool(asked.documents),
            "window": asked.window is not None,
            "sinks": asked.sinks,
            "softcap": asked.softcap is not None,
            "scale": asked.scale is not None,
            "grouped_heads": asked.kv_heads < asked.heads,
            "few_kv_heads": asked.kv_heads % ranks != 0,
            "odd_lengths": ranks > 1 and any(each % (2 * ranks) for each in (asked.tokens, *asked.micro_batches)),
            "short": ranks > 1 and asked.tokens < 2 * ranks,
            "batch": asked.batch > 1,
            "bf16": asked.dtype == "bf16",
            "fp64": asked.dtype == "fp64",
            "deterministic": way in ("repeated", "same"),
            "padding_left": any(left for left, _ in asked.padding),
            "padding_right": any(right for _, right in asked.padding),
            "evaluation": way == "evaluated",
            "accumulation": bool(asked.micro_batches),
            "checkpointing": asked.checkpointing,
            "offload": asked.offload,
            "autocast": asked.autocast,
            "tied": asked.tied,
            "frozen": bool(asked.frozen),
            "two_models": way in ("models", "crossed"),
            "bytes": way == "bytes",
        }
        return frozenset(name for name, needed in found.items() if needed)


_PACKED = (5, 1, 17, 9, 2, 14, 16)  # 64 tokens; boundaries within shards and at their edges
_EVEN = (16, 16, 16, 16)
_GROUPED: dict[str, Any] = {"heads": 8, "kv_heads": 2}
_MANY: dict[str, Any] = {"heads": 8, "kv_heads": 8}
_LONG = 64


def _case(name: str, source: str, way: str = "once", *, quick: bool = False, **asked: Any) -> ConformCase:
    training = way in TRAINING_WAYS
    sizes: dict[str, Any] = {"tokens": _LONG, **_MANY, "head_dim": 8 if not training else 4}
    problem = CaseProblem(**{**sizes, **asked})
    return ConformCase(name=name, problem=problem, source=source, way=way, quick=quick)


ATTENTION_CASES = (
    _case("causal", "NVIDIA/Megatron-LM#1464", quick=True),
    _case("full", "fault: a causal mask where none was asked", mask="full", quick=True),
    _case("one-token-per-chunk", "fault: a chunk of one token", tokens=16),
    _case("odd-length", "NVIDIA/TransformerEngine#1929", tokens=61),
    _case("odd-length-full", "jzhang38/EasyContext#47", tokens=59, mask="full"),
    _case("very-short", "fault: ranks without a token", tokens=3),
    _case("batch", "fault: rows of a batch mixed", batch=3),
    _case("grouped-heads", "pytorch/torchtitan#1283", **_GROUPED, quick=True),
    _case("one-kv-head", "PrimeIntellect-ai/prime-rl#3042", heads=8, kv_heads=1),
    _case("wide-heads", "fault: the scale of another head_dim", head_dim=40),
    _case("scale", "PrimeIntellect-ai/prime-rl#2828", scale=0.11),
    _case("documents", "axolotl-ai-cloud/axolotl#3608", documents=_PACKED, quick=True),
    _case("documents-at-edges", "PrimeIntellect-ai/prime-rl#2392", documents=_EVEN),
    _case("documents-of-one", "fault: a document that sees itself alone", documents=(1,) * 12 + (52,)),
    _case("documents-first-long", "fault: a document over several ranks", documents=(45, 3, 16)),
    _case("documents-full", "fault: documents are causal in any case", documents=_PACKED, mask="full"),
    _case("documents-odd", "NVIDIA/TransformerEngine#1930", tokens=47, documents=(4, 3, 40)),
    _case("documents-batch", "fault: boundaries of the first row alone", documents=_PACKED, batch=2, **_GROUPED),
    _case("documents-leak", "axolotl-ai-cloud/axolotl#4002", "leak", documents=_PACKED),
    _case("window", "PrimeIntellect-ai/prime-rl#2828", window=11, quick=True),
    _case("window-over-ranks", "fault: a window that ends in another shard", window=37),
    _case("window-of-one", "fault: a window off by one", window=0),
    _case("window-documents", "fault: a window that crosses documents", window=6, documents=_PACKED),
    _case("sinks", "PrimeIntellect-ai/prime-rl#3397", sinks=True),
    _case("sinks-grouped-window", "verl-project/verl#4551", sinks=True, window=9, **_GROUPED),
    _case("sinks-documents", "fault: sinks added once per chunk", sinks=True, documents=_PACKED),
    _case("softcap", "fault: a derivative without that of tanh", softcap=1.5),
    _case("bf16", "fault: partial sums in bfloat16", dtype="bf16"),
    _case("bf16-documents", "NVIDIA/TransformerEngine#3487", dtype="bf16", documents=_PACKED),
    _case("fp64", "fault: a float32 buffer in between", dtype="fp64"),
    _case("no-later-token", "fault: a mask off by one", "leak"),
    _case("called-again", "NVIDIA/TransformerEngine#3487", "again"),
    _case("documents-called-again", "NVIDIA/TransformerEngine#3487", "again", documents=_PACKED),
    _case("crossed-backwards", "NVIDIA-NeMo/Automodel#3157", "crossed"),
    _case("after-no-grad", "fault: a plan made without gradients", "after_no_grad"),
    _case("strided-inputs", "fault: a kernel that takes memory as contiguous", "strided"),
    _case("inputs-kept", "fault: an input as a buffer", "kept"),
    _case("frozen-keys", "fault: a gradient that is not asked for", frozen=("k", "v")),
    _case("frozen-queries", "huggingface/trl#4314", frozen=("q",)),
    _case("repeated", "fault: sums in the order of arrival", "repeated", documents=_PACKED),
    _case("bytes-sent", "fault: more is sent than claimed", "bytes"),
)

TRAINING_CASES = (
    _case("step", "verl-project/verl#6609", "step"),
    _case("step-grouped-heads", "fault: a KV head's gradient counted per query head", "step", **_GROUPED),
    _case("step-one-kv-head", "InternLM/InternEvo#224", "step", heads=8, kv_heads=1),
    _case("step-odd-length", "NVIDIA/TransformerEngine#1929", "step", tokens=61),
    _case("step-batch", "fault: rows of a batch mixed", "step", batch=3, tokens=32),
    _case("step-documents", "axolotl-ai-cloud/axolotl#3608", "step", documents=_PACKED),
    _case("step-documents-at-edges", "swiss-ai/Megatron-LM#104", "step", documents=_EVEN),
    _case("step-documents-odd", "NVIDIA/TransformerEngine#1930", "step", tokens=47, documents=(4, 3, 40)),
    _case("step-window", "axolotl-ai-cloud/axolotl#3928", "step", window=11),
    _case("ignored-prompt", "axolotl-ai-cloud/axolotl#3026", "step", unlabelled=40),
    _case("ignored-labels", "huggingface/transformers#41832", "step", every=3),
    _case("ignored-at-edges", "huggingface/transformers#36607", "step", every=8),
    _case("padding-right", "fault: padding counted as tokens", "step", batch=2, padding=((0, 0), (0, 27))),
    _case("padding-left", "fault: positions that count padding", "step", batch=2, padding=((9, 0), (0, 0))),
    _case("padding-both", "fault: padding on one side alone", "step", batch=3, padding=((9, 5), (0, 20), (30, 0))),
    _case("accumulation", "verl-project/verl#2857", "step", micro_batches=(64, 16, 48)),
    _case("accumulation-documents", "verl-project/verl#2857", "step", micro_batches=(64, 32), documents=_PACKED),
    _case("evaluation", "huggingface/transformers#48167", "evaluated"),
    _case("evaluation-ignored", "modelscope/ms-swift#9152", "evaluated", unlabelled=40),
    _case("checkpointing", "huggingface/trl#4314", "step", checkpointing=True, documents=_PACKED),
    _case("offload", "NVIDIA-NeMo/Automodel#3157", "step", offload=True),
    _case("autocast", "fault: queries in float32 beside values in bfloat16", "step", autocast=True),
    _case("step-bf16", "fault: a loss summed in bfloat16", "step", dtype="bf16"),
    _case("tied", "fault: one of two gradients of a matrix", "step", tied=True),
    _case("frozen-embedding", "huggingface/trl#4314", "step", frozen=("model.embed_tokens",)),
    _case("frozen-layer", "fault: a rank that waits for a gradient", "step", frozen=("model.layers.0",)),
    _case("second-step", "huggingface/diffusers#14265", "steps"),
    _case("second-step-documents", "NVIDIA/TransformerEngine#3487", "steps", documents=_PACKED),
    _case("two-models", "fault: state of a module kept globally", "models"),
    _case("other-documents", "axolotl-ai-cloud/axolotl#4002", "rewritten", documents=_PACKED),
    _case("same-step", "fault: sums in the order of arrival", "same"),
)
CASES = ATTENTION_CASES + TRAINING_CASES


def cases_of(kind: str, *, quick: bool = False) -> list[ConformCase]:
    """The cases of attention or of training; the quick ones alone where asked."""
    return [case for case in CASES if case.kind == kind and (case.quick or not quick)]


def case_named(name: str) -> ConformCase:
    """Raises ValueError for a name of none."""
    for case in CASES:
        if case.name == name:
            return case
    from difflib import get_close_matches

    near = get_close_matches(name, [case.name for case in CASES], 1)
    raise ValueError(f"{name} is no case; {f'did you mean {near[0]}?' if near else 'burst conform --list names them'}")

"""The table of cases that targets have to pass. The source of each is a public thread, or a fault that it finds.

A case is a problem together with a sequence of calls that solves it (`WAYS`). The capabilities that a case needs are
derived from its problem, so that none is forgotten.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from conform.target import CaseProblem

# The calls that a case makes.
WAYS = {
    # of attention, and of a recurrence
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
        """attention, recurrence or training."""
        if self.way in TRAINING_WAYS:
            return "training"
        return "recurrence" if self.problem.recurrence else "attention"

    def needs(self, ranks: int) -> frozenset[str]:
        """Capabilities that a target has to claim for this case on so many ranks."""
        asked, way = self.problem, self.way
        found = {
            asked.recurrence or asked.mask: True,
            "documents": bool(asked.documents),
            "window": asked.window is not None,
            "sinks": asked.sinks,
            "softcap": asked.softcap is not None,
            "scale": asked.scale is not None,
            "grouped_heads": asked.kv_heads < asked.heads,
            "value_dim": asked.value_dim not in (None, asked.head_dim),
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
_NARROW: dict[str, Any] = {"head_dim": 12, "value_dim": 8}
_LONG = 64
_DELTA: dict[str, Any] = {"recurrence": "gated_delta_net"}
_MAMBA: dict[str, Any] = {"recurrence": "mamba2"}
_STRONG = 6.0  # a state is forgotten within a token or two


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
    _case("narrow-values", "fault: the scale of V's head dim", **_NARROW),
    _case("narrow-values-grouped", "NVIDIA/TransformerEngine#2868", **_NARROW, **_GROUPED),
    _case("narrow-values-documents", "fault: V sent in the shape of K", "again", **_NARROW, documents=_PACKED),
    _case("narrow-values-bf16", "fault: partial sums in bfloat16", **_NARROW, dtype="bf16", mask="full"),
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

RECURRENCE_CASES = (
    _case("delta", "AI-Hypercomputer/maxtext#4932", **_DELTA),
    _case("delta-no-decay", "fla-org/flash-linear-attention#389", **_DELTA, decay=0.0),
    _case("delta-strong-decay", "pytorch/executorch#21417", **_DELTA, decay=_STRONG),
    _case("delta-long-memory", "mindspore-ai/hyper-parallel#257", **_DELTA, decay=0.01, head_dim=32),
    _case("delta-one-token-per-rank", "fla-org/flash-linear-attention#774", **_DELTA, tokens=8),
    _case("delta-odd-length", "fault: the last tokens lost", **_DELTA, tokens=61),
    _case("delta-very-short", "fault: ranks without a token", **_DELTA, tokens=3),
    _case("delta-batch", "fault: the state of the first row for all", **_DELTA, batch=3),
    _case("delta-grouped-heads", "fla-org/flash-linear-attention#421", **_DELTA, **_GROUPED),
    _case("delta-one-key-head", "NVIDIA/Megatron-LM#2614", **_DELTA, heads=8, kv_heads=1),
    _case("delta-wide-values", "fault: a state with its sides exchanged", **_DELTA, value_dim=20),
    _case("delta-documents", "PrimeIntellect-ai/prime-rl#3002", **_DELTA, documents=_PACKED),
    _case("delta-documents-at-edges", "fault: a state sent on past a document's end", **_DELTA, documents=_EVEN),
    _case("delta-documents-of-one", "THUDM/slime#1686", **_DELTA, documents=(1,) * 12 + (52,)),
    _case("delta-documents-first-long", "fault: a state reset on every rank", **_DELTA, documents=(45, 3, 16)),
    _case("delta-documents-odd", "fault: padding that joins a document", **_DELTA, tokens=47, documents=(4, 3, 40)),
    _case("delta-documents-batch", "fla-org/flash-linear-attention#955", **_DELTA, documents=_PACKED, batch=2),
    _case("delta-documents-leak", "NVIDIA-NeMo/Automodel#2131", "leak", **_DELTA, documents=_PACKED),
    _case("delta-no-later-token", "fault: a chunk's last state read by all of its tokens", "leak", **_DELTA),
    _case("delta-bf16", "fault: decays that bfloat16 rounds to 1", **_DELTA, dtype="bf16", decay=0.01),
    _case("delta-fp64", "fault: states in float32", **_DELTA, dtype="fp64"),
    _case("delta-called-again", "fault: the state of the call before", "again", **_DELTA),
    _case("delta-documents-called-again", "fault: boundaries kept", "again", **_DELTA, documents=_PACKED),
    _case("delta-crossed-backwards", "fault: the state of the newest call in backward", "crossed", **_DELTA),
    _case("delta-after-no-grad", "fault: a plan made without gradients", "after_no_grad", **_DELTA),
    _case("delta-strided-inputs", "fault: a kernel that takes memory as contiguous", "strided", **_DELTA),
    _case("delta-inputs-kept", "fault: an input as a buffer", "kept", **_DELTA),
    _case("delta-frozen-gates", "fault: a gradient that is not asked for", **_DELTA, frozen=("decay", "beta")),
    _case("delta-repeated", "fault: sums in the order of arrival", "repeated", **_DELTA, documents=_PACKED),
    _case("delta-bytes-sent", "fault: more is sent than claimed", "bytes", **_DELTA),
    _case("mamba2", "NVIDIA/Megatron-LM#1437", **_MAMBA),
    _case("mamba2-no-decay", "fault: the gradient of a decay that is 1", **_MAMBA, decay=0.0),
    _case("mamba2-strong-decay", "fault: exponentials of sums that overflow", **_MAMBA, decay=_STRONG),
    _case("mamba2-odd-length", "fault: the last tokens lost", **_MAMBA, tokens=61),
    _case("mamba2-grouped-heads", "NVIDIA/Megatron-LM#6808", **_MAMBA, **_GROUPED, value_dim=12),
    _case("mamba2-documents", "PrimeIntellect-ai/prime-rl#3000", **_MAMBA, documents=_PACKED),
    _case("mamba2-documents-batch", "fault: boundaries of the first row alone", **_MAMBA, documents=_EVEN, batch=2),
    _case("mamba2-documents-leak", "NovaSky-AI/SkyRL#2056", "leak", **_MAMBA, documents=_PACKED),
    _case("mamba2-bf16", "fault: states in bfloat16", **_MAMBA, dtype="bf16", decay=0.01),
    _case("mamba2-called-again", "fault: boundaries kept", "again", **_MAMBA, documents=_PACKED),
    _case("mamba2-repeated", "fault: sums in the order of arrival", "repeated", **_MAMBA),
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
CASES = ATTENTION_CASES + RECURRENCE_CASES + TRAINING_CASES


def cases_of(kind: str, *, quick: bool = False) -> list[ConformCase]:
    """The cases of a kind of target; the quick ones alone where asked."""
    return [case for case in CASES if case.kind == kind and (case.quick or not quick)]


def case_named(name: str) -> ConformCase:
    """Raises ValueError for a name of none."""
    for case in CASES:
        if case.name == name:
            return case
    from difflib import get_close_matches

    near = get_close_matches(name, [case.name for case in CASES], 1)
    raise ValueError(f"{name} is no case; {f'did you mean {near[0]}?' if near else 'burst conform --list names them'}")

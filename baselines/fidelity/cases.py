"""What is run of each system: data, and for each algorithm the bytes that its authors' code has to send.

The cases of attention are `SYSTEMS`, those of training `TRAINING`. Shapes of attention are small, because errors and
bytes are the question: two sequences of 128 tokens, eight query heads over four KV heads of dimension 16, so that
grouped heads are part of every comparison that a system allows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from baselines.pin import FOLDER

SEQ_LEN, BATCH, HEAD_DIM = 128, 2, 16
STAND_IN = "stand-in: proves the ring, not the kernel"
TORCH_KERNEL = "torch's own for CPUs"
WIDTHS = {"fp32": 4, "bf16": 2}
ALST = {"attention": "UlyssesSPAttentionHF"}  # for DeepSpeed's call.py


@dataclass(frozen=True, kw_only=True, slots=True)
class Formula:
    """Bytes that a rank sends in one forward and backward.

    `words` has P ranks, X bytes per element of the inputs, q and kv: elements of one rank's query and of its K and V
    together.
    """

    words: str
    count: Callable[[Case], float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One forward and backward of a system's attention."""

    name: str
    form: str
    ranks: int
    dtype: str
    layout: str = "zigzag"
    heads: int = 8
    kv_heads: int = 4
    options: Mapping[str, object] = field(default_factory=dict)  # for `call.py`, over what the adapter asks for
    formula: Formula | None = None
    native: str = ""  # method whose attention is the same algorithm
    node_size: int | None = None  # ranks that count as a node of it
    alone: bool = False  # in processes of its own, because an error may leave ranks in different states

    @property
    def query(self) -> int:
        """Elements of one rank's q."""
        return BATCH * SEQ_LEN // self.ranks * self.heads * HEAD_DIM

    @property
    def pair(self) -> int:
        """Elements of one rank's K and V."""
        return 2 * BATCH * SEQ_LEN // self.ranks * self.kv_heads * HEAD_DIM

    @property
    def width(self) -> int:
        """Bytes of one element of the inputs."""
        return WIDTHS[self.dtype]


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemCases:
    """A system's attention, and its cases."""

    package: str  # folder of its pin; "" is a part of torch
    title: str
    kernel: str
    cases: tuple[Case, ...]
    call: str = ""  # in the place of `call.py` of the package


def _ring(case: Case) -> float:
    return case.pair * (2 * case.width * (case.ranks - 1) + 4 * case.ranks)


def _heads(case: Case) -> float:
    received = max(case.kv_heads, case.ranks) / case.kv_heads  # fewer KV heads than ranks are repeated
    return (4 * case.query + 2 * case.pair * received) * case.width * (case.ranks - 1) / case.ranks


def _heads_and_positions(case: Case) -> float:
    return _heads(case) + 8 * BATCH * SEQ_LEN // case.ranks * (case.ranks - 1)


def _hybrid(case: Case) -> float:
    across = int(str(case.options["head_ranks"]))
    rings = case.ranks // across
    heads = (4 * case.query + 2 * case.pair) * case.width * (across - 1) / across
    return heads + case.pair * (2 * case.width * (rings - 1) + 4 * rings)


def _double_ring(case: Case) -> float:
    inner, x = int(str(case.options["window"])), case.width
    outer = case.ranks // inner
    hops = 2 * ((inner - 1) * outer + outer - 1)  # of K and V, in both passes
    return case.pair * (x * hops + 4 * inner + x * inner * (outer - 1) + x * outer)


RING = Formula(words="kv (2X (P - 1) + 4P): gradients in fp32, and once more back to their owner", count=_ring)
HEADS = Formula(words="(4q + 2kv) X (P - 1) / P; K and V repeated to P heads where there are fewer", count=_heads)
HEADS_AND_POSITIONS = Formula(
    words="as DistributedAttention, and position_ids to every rank", count=_heads_and_positions
)
HYBRID = Formula(
    words="(4q + 2kv) X (U - 1) / U + kv (2X (R - 1) + 4R), U ranks of the all-to-all, R of the ring", count=_hybrid
)
DOUBLE_RING = Formula(
    words="kv (2X (WM - 1) + 4W + X W (M - 1) + X M), M windows of W ranks: fp32 in the first window alone",
    count=_double_ring,
)  # fmt: skip


def _each(ranks: tuple[int, ...] = (2, 4), dtypes: tuple[str, ...] = ("fp32", "bf16")) -> list[tuple[int, str]]:
    return [(each, dtype) for each in ranks for dtype in dtypes]


def _name(*parts: object) -> str:
    return "-".join(map(str, parts))


SYSTEMS: Mapping[str, SystemCases] = {
    "torch_ring": SystemCases(
        package="",
        title="torch context_parallel",
        kernel=TORCH_KERNEL,
        call=str(FOLDER / "torch_cp" / "call.py"),
        cases=(
            *(
                Case(
                    name=_name(layout, ranks, dtype), form=f"ring below context_parallel, {layout}", ranks=ranks,
                    dtype=dtype, layout=layout, heads=4, formula=RING, native=native,
                )
                for layout, native in (("contiguous", "ring"), ("zigzag", "megatron_cp"))
                for ranks, dtype in _each()
            ),
            Case(
                name="public-2-fp32", form="context_parallel, the public call", ranks=2, dtype="fp32",
                layout="contiguous", heads=4, options={"public": True}, alone=True,
            ),
        ),
    ),
    "ring_flash_attn": SystemCases(
        package="ring_flash_attn",
        title="ring-flash-attention",
        kernel=STAND_IN,
        cases=tuple(
            Case(
                name=_name(ring, ranks, dtype), form=f"{ring} ring", ranks=ranks, dtype=dtype, layout=layout,
                options={"ring": ring}, formula=RING, native=native,
            )
            for ring, layout, native in (
                ("zigzag", "zigzag", "megatron_cp"), ("plain", "contiguous", "ring"), ("striped", "striped", ""),
            )
            for ranks, dtype in _each()
        ),
    ),
    "yunchang": SystemCases(
        package="yunchang",
        title="yunchang (USP)",
        kernel=STAND_IN,
        cases=(
            *(
                Case(
                    name=_name(f"{across}x{ranks // across}", dtype),
                    form=f"all-to-all over {across}, zigzag ring over {ranks // across}", ranks=ranks, dtype=dtype,
                    options={"head_ranks": across}, formula=HYBRID,
                    native="megatron_cp" if across == 1 else "loongtrain_usp",
                    node_size=None if across == 1 else across,
                )
                for across, ranks in ((1, 2), (1, 4), (2, 4))
                for dtype in ("fp32", "bf16")
            ),
            *(
                Case(
                    name=_name(f"{ranks}x1", "bf16"), form=f"all-to-all over {ranks}, ring of 1", ranks=ranks,
                    dtype="bf16", options={"head_ranks": ranks}, alone=True,
                )
                for ranks in (2, 4)
            ),
        ),
    ),
    "loongtrain": SystemCases(
        package="loongtrain",
        title="LoongTrain's double ring",
        kernel=STAND_IN,
        cases=(
            *(
                Case(
                    name=_name(f"{window}x{ranks // window}", dtype),
                    form=f"{ranks // window} windows of {window} ranks", ranks=ranks, dtype=dtype,
                    options={"window": window}, formula=DOUBLE_RING, native="loongtrain_double_ring", node_size=window,
                )
                for window, ranks in ((2, 4),)
                for dtype in ("fp32", "bf16")
            ),
            *(
                Case(
                    name=_name(f"{window}x{ranks // window}", "bf16"),
                    form=f"{ranks // window} windows of {window} ranks", ranks=ranks, dtype="bf16",
                    options={"window": window}, alone=True,
                )
                for window, ranks in ((2, 2), (1, 2))
            ),
        ),
    ),
    "deepspeed": SystemCases(
        package="deepspeed",
        title="DeepSpeed DistributedAttention",
        kernel=TORCH_KERNEL,
        cases=(
            *(
                Case(
                    name=_name("heads", ranks, dtype), form="all-to-all of heads", ranks=ranks, dtype=dtype,
                    layout="contiguous", formula=HEADS, native="ulysses",
                )
                for ranks, dtype in _each()
            ),
            Case(
                name="few-kv-heads-4-fp32", form="fewer KV heads than ranks", ranks=4, dtype="fp32",
                layout="contiguous", kv_heads=2, alone=True,
            ),
        ),
    ),
    "ulysses_sp": SystemCases(
        package="deepspeed",
        title="DeepSpeed UlyssesSPAttentionHF",
        kernel=TORCH_KERNEL,
        cases=(
            *(
                Case(
                    name=_name("heads", ranks, dtype), form="all-to-all of heads", ranks=ranks, dtype=dtype,
                    layout="contiguous", options=ALST, formula=HEADS_AND_POSITIONS, native="ulysses",
                )
                for ranks, dtype in _each()
            ),
            Case(
                name="few-kv-heads-4-fp32", form="fewer KV heads than ranks", ranks=4, dtype="fp32",
                layout="contiguous", kv_heads=2, options=ALST, formula=HEADS_AND_POSITIONS,
            ),
        ),
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCase:
    """Steps on some ranks, in fp32."""

    name: str
    form: str
    ranks: int


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSystem:
    """A system's model, trained by a program of ours that its interpreter runs."""

    package: str  # folder of its pin
    title: str
    kernel: str
    program: str  # of baselines/programs
    names: Literal["hugging_face", "megatron"]  # how its parameters are named and split
    steps: int
    cases: tuple[TrainingCase, ...]


TRAINING: Mapping[str, TrainingSystem] = {
    "megatron_core": TrainingSystem(
        package="megatron_core",
        title="Megatron Core GPT",
        kernel="its local layers; the CPU is named where it asks for the current GPU",
        program="train_megatron_core.py",
        names="megatron",
        steps=1,
        cases=tuple(
            TrainingCase(name=f"tp-{ranks}", form=f"tensor parallel over {ranks}, one step", ranks=ranks)
            for ranks in (1, 2, 4)
        ),
    ),
    "ulysses_training": TrainingSystem(
        package="deepspeed",
        title="Llama of transformers under DeepSpeed",
        kernel=TORCH_KERNEL,
        program="train_transformers.py",
        names="hugging_face",
        steps=3,
        cases=tuple(
            TrainingCase(
                name=f"sp-{ranks}", form=f"UlyssesSPAttentionHF over {ranks}, ZeRO-3, three steps", ranks=ranks
            )
            for ranks in (2, 4)
        ),
    ),
}

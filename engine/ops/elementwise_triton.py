"""SwiGLU's product and rotary positions as Triton kernels, one pass over memory each.

Their reference implementations in torch are in `engine.ops.elementwise`. Addresses are
64 bits: a million tokens of an MLP 14336 wide are 2^33 elements. Arithmetic is fp32 (rotations: that of the angles).

Sizes are fixed, since tuning them would take time at every start. A memory as fast as an H200's stays busy while each
processor has about 32 KiB of reads under way. In bf16 every thread has at least two independent reads of 16 bytes, the
widest there are. SwiGLU's kernels compile to 32 registers, so that 16 programs of 4 warps fit a processor: 64 KiB. A
rotation's take 36 to 40: 12 programs, 48 KiB, angles not counted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # elements of each tensor one program of SwiGLU takes: 8 for each thread
PAIRS = 1024  # pairs one program of a rotation takes, likewise
WARPS = 4


@triton.jit
def raise_largest(largest, values):  # type: ignore[no-untyped-def]
    """From now on `largest` is no less than the absolute values of `values`, a block of one dimension. It is an integer
    of their bits in fp32: that of NaN is the greatest, that of infinity the next."""
    bits = tl.max(values.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0)
    # Few programs find a larger one: the others only read.
    tl.atomic_max(largest, bits, mask=bits > tl.load(largest), sem="relaxed")


@triton.jit
def _swiglu_kernel(  # type: ignore[no-untyped-def]
    gate, up, hidden, largest, elements, LARGEST: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < elements
    g = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=live, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp(-g))
    h = (g * s * u).to(hidden.dtype.element_ty)
    tl.store(hidden + at, h, mask=live)
    if LARGEST:
        raise_largest(largest, h)


@triton.jit
def swiglu_and_gradients(d, g, u):  # type: ignore[no-untyped-def]
    """(hidden, dgate, dup) in fp32, from dhidden, gate and up."""
    s = 1.0 / (1.0 + tl.exp(-g))
    return g * s * u, d * u * s * (1.0 + g * (1.0 - s)), d * (g * s)


@triton.jit
def _swiglu_backward_kernel(  # type: ignore[no-untyped-def]
    dhidden, gate, up, hidden, dgate, dup, elements,
    AGAIN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = at < elements
    d = tl.load(dhidden + at, mask=live, other=0.0).to(tl.float32)
    g = tl.load(gate + at, mask=live, other=0.0).to(tl.float32)
    u = tl.load(up + at, mask=live, other=0.0).to(tl.float32)
    h, dg, du = swiglu_and_gradients(d, g, u)
    if AGAIN:
        # Results overwrite arguments: all of this block is read before any of it is overwritten.
        tl.debug_barrier()
        tl.store(hidden + at, h.to(hidden.dtype.element_ty), mask=live)
    tl.store(dgate + at, dg.to(dgate.dtype.element_ty), mask=live)
    tl.store(dup + at, du.to(dup.dtype.element_ty), mask=live)


@triton.jit
def _rotate_kernel(  # type: ignore[no-untyped-def]
    x, x_b, x_l, x_n, cos, sin, out, out_b, out_l, out_n, rows,
    HEADS: tl.constexpr, HALF: tl.constexpr, INVERSE: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    # A row is one head of one token, heads fastest: the heads of a token follow each other and read its angles from the
    # cache.
    batch = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    token = row // HEADS
    head = row % HEADS
    box = (row < rows)[:, None] & (column < HALF)[None, :]
    angle = (token * HALF)[:, None] + column[None, :]
    c = tl.load(cos + angle, mask=box, other=0.0)
    s = tl.load(sin + angle, mask=box, other=0.0)
    if INVERSE:
        s = -s
    source = x + batch * x_b + (token * x_l + head * x_n)[:, None] + column[None, :]
    first = tl.load(source, mask=box, other=0.0).to(c.dtype)
    second = tl.load(source + HALF, mask=box, other=0.0).to(c.dtype)
    target = out + batch * out_b + (token * out_l + head * out_n)[:, None] + column[None, :]
    # By way of fp32: not every pair of dtypes has a conversion of its own.
    tl.store(target, (first * c - second * s).to(tl.float32).to(out.dtype.element_ty), mask=box)
    tl.store(target + HALF, (second * c + first * s).to(tl.float32).to(out.dtype.element_ty), mask=box)


def swiglu(gate: Tensor, up: Tensor, largest: Tensor | None = None) -> Tensor:
    """`engine.ops.elementwise.swiglu` without autograd; contiguous."""
    assert gate.shape == up.shape
    gate, up = gate.contiguous(), up.contiguous()
    hidden = torch.empty_like(gate)
    _swiglu_kernel[_blocks(gate)](
        gate, up, hidden, largest, gate.numel(), LARGEST=largest is not None, BLOCK=BLOCK, num_warps=WARPS
    )
    return hidden


def swiglu_gradients(dhidden: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """(dgate, dup) in memory of their own; contiguous."""
    dhidden, gate, up = dhidden.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    _swiglu_backward(dhidden, gate, up, dhidden, dgate, dup, again=False)
    return dgate, dup


def swiglu_again(dhidden: Tensor, gate: Tensor, up: Tensor, *, saved: bool) -> tuple[Tensor, Tensor, Tensor]:
    """`engine.ops.elementwise.swiglu_again`; results take the place of dhidden, and unless `saved` of gate and up."""
    dhidden, gate, up = dhidden.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = (torch.empty_like(gate), torch.empty_like(up)) if saved else (gate, up)
    _swiglu_backward(dhidden, gate, up, dhidden, dgate, dup, again=True)
    return dhidden, dgate, dup


def _swiglu_backward(
    dhidden: Tensor, gate: Tensor, up: Tensor, hidden: Tensor, dgate: Tensor, dup: Tensor, *, again: bool
) -> None:
    assert dhidden.shape == gate.shape == up.shape
    _swiglu_backward_kernel[_blocks(gate)](
        dhidden, gate, up, hidden, dgate, dup, gate.numel(), AGAIN=again, BLOCK=BLOCK, num_warps=WARPS
    )


def _blocks(tensor: Tensor) -> tuple[int]:
    return (triton.cdiv(tensor.numel(), BLOCK),)


def rotate(x_BLND: Tensor, cos_LD: Tensor, sin_LD: Tensor, inverse: bool, out_BLND: Tensor | None = None) -> Tensor:
    """`engine.ops.elementwise.rotate` without autograd, or the inverse rotation; in `out` if given, else contiguous.

    x and `out` have any strides, those of `out` 1 over D; x is copied where D has no unit stride.
    """
    batch, tokens, heads, head_dim = x_BLND.shape
    half = head_dim // 2
    x_BLND = x_BLND if x_BLND.stride(-1) == 1 else x_BLND.contiguous()
    cos_LD, sin_LD = (table.expand(tokens, half).contiguous() for table in (cos_LD, sin_LD))
    if out_BLND is None:
        out_BLND = torch.empty(x_BLND.shape, dtype=x_BLND.dtype, device=x_BLND.device)
    assert out_BLND.stride(-1) == 1
    assert out_BLND.shape == x_BLND.shape
    width = triton.next_power_of_2(half)
    rows = max(1, PAIRS // width)
    _rotate_kernel[(triton.cdiv(tokens * heads, rows), batch)](
        x_BLND, *x_BLND.stride()[:3], cos_LD, sin_LD, out_BLND, *out_BLND.stride()[:3], tokens * heads,
        HEADS=heads, HALF=half, INVERSE=inverse, ROWS=rows, WIDTH=width, num_warps=WARPS,
    )  # fmt: skip
    return out_BLND

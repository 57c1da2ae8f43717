"""Each kernel that this machine can run computes a tile like the reference kernel does, forward and backward."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention.accumulate.accumulators import GradAccumulator, OutputAccumulator, merge_parts, row_dot
from engine.attention.geometry.tiles import CAUSAL, FULL, Band
from engine.attention.kernels import (
    KERNELS,
    BackwardInputs,
    KernelProblem,
    available,
    choose_kernel,
    kernel_named,
    unsupported_reason,
)
from engine.attention.kernels.cpu import CpuKernel
from engine.attention.kernels.fa4 import keep_compiled
from engine.attention.kernels.stand_in import output_stand_in
from engine.measurement import relative_error, relative_errors

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
REFERENCE = kernel_named("reference")
TILES = [  # rows, columns, band
    (64, 64, FULL),
    (64, 96, FULL),
    (128, 64, FULL),
    (64, 64, CAUSAL),
    (128, 128, CAUSAL),
    (64, 64, Band(-7, 3)),
    (64, 96, Band(None, 20)),
    (96, 64, Band(-40, None)),
]


def tile_inputs(rows: int, columns: int, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype):
    generator = torch.Generator().manual_seed(rows * columns + heads)
    shapes = [(2, rows, heads, head_dim), *[(2, columns, kv_heads, head_dim)] * 2, (2, rows, heads, head_dim)]
    return [torch.randn(s, generator=generator).to(DEVICE, dtype) for s in shapes]


def runnable(name: str, dtype: torch.dtype, head_dim: int, band: Band, heads: int = 4, kv_heads: int = 4) -> None:
    problem = KernelProblem(
        device=DEVICE, dtype=dtype, heads=heads, kv_heads=kv_heads, head_dim=head_dim, bands=frozenset({band.kind})
    )
    reason = unsupported_reason(kernel_named(name), problem)
    if reason:
        pytest.skip(reason)


@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
@pytest.mark.parametrize(("rows", "columns", "band"), TILES)
@pytest.mark.parametrize("name", [name for name in KERNELS if name != "reference"])
def test_a_kernel_equals_the_reference_on_every_kind_of_tile(name, rows, columns, band, heads, head_dim) -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    runnable(name, dtype, head_dim, band, *heads)
    q, k, v, dout = tile_inputs(rows, columns, *heads, head_dim, dtype)
    scale = head_dim**-0.5
    wide = [t.double() for t in (q, k, v, dout)]
    out, lse = REFERENCE.forward(*wide[:3], band, scale)
    # As in a ring, lse and delta belong to rows with further keys: the LSE grows, so every probability shrinks.
    whole_lse, delta = lse + 0.5, row_dot(wide[3], out) * 0.6
    expected = REFERENCE.backward(BackwardInputs(wide[0], wide[3], whole_lse, delta, *wide[1:3]), band, scale, False)

    kernel = kernel_named(name)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    part, part_lse = kernel.forward(q, k, v, band, scale)
    assert max(relative_errors((part, part_lse), (out, lse))) < tolerance
    found = kernel.backward(BackwardInputs(q, dout, whole_lse.float(), delta.float(), k, v), band, scale, False)
    for gradient, truth, source in zip(found, expected, (q, k, v), strict=True):
        assert gradient.shape == source.shape
        assert relative_error(gradient, truth) < tolerance


@pytest.mark.parametrize("name", [name for name in KERNELS if name != "reference"])
def test_a_row_whose_gradient_is_zero_stays_zero(name) -> None:
    dtype = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
    runnable(name, dtype, 64, CAUSAL)
    q, k, v, dout = tile_inputs(64, 64, 4, 4, 64, dtype)
    dout[:, 10:20] = 0
    _, lse = REFERENCE.forward(q, k, v, CAUSAL, 0.125)
    delta = row_dot(dout, dout)
    dq, dk, dv = kernel_named(name).backward(BackwardInputs(q, dout, lse.float(), delta, k, v), CAUSAL, 0.125, False)
    assert torch.isfinite(dk).all()
    assert torch.isfinite(dv).all()
    assert dq[:, 10:20].abs().max() == 0


@pytest.mark.parametrize("size", [1.0, 1e-12, 1e-30, 1e20])
def test_the_stand_in_for_the_output_has_the_right_row_sums_at_any_magnitude(size) -> None:
    dout = torch.randn(2, 8, 3, 16) * size
    out = torch.randn(2, 8, 3, 16)
    dout[0, 0] = 0
    delta = row_dot(dout, out)
    rebuilt = row_dot(dout, output_stand_in(dout, delta))
    torch.testing.assert_close(rebuilt, delta, rtol=1e-4, atol=0)


@pytest.mark.parametrize("size", [1e-6, 1.0, 1e4, 1e9])
@pytest.mark.parametrize("band", [FULL, CAUSAL, Band(-7, 3)], ids=str)
@pytest.mark.parametrize("name", [name for name in KERNELS if not kernel_named(name).takes_delta])
def test_a_kernel_that_wants_an_output_is_made_to_take_any_delta(name, band, size) -> None:
    dtype = torch.float16 if DEVICE.type == "cuda" else torch.float32
    runnable(name, dtype, 64, band, 4, 2)
    q, k, v, dout = tile_inputs(64, 64, 4, 2, 64, dtype)
    dout *= 1e-2
    dout[:, ::2], dout[0, 1, 1] = 0, 6e-8  # the least that fp16 has
    _, lse = REFERENCE.forward(q, k, v, band, 0.125)
    delta = torch.randn(lse.shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) * size
    delta[1] = 0
    given = BackwardInputs(q, dout, lse.float(), delta, k, v)
    expected = REFERENCE.backward(given, band, 0.125, False)
    found = replace(kernel_named(name), takes_delta=True).backward(given, band, 0.125, False)
    half = dtype == torch.float16
    for gradient, truth in zip(found, expected, strict=True):
        if half and truth.abs().max() > 3e4:  # out of what the kernel can write
            continue
        assert relative_error(gradient, truth) < (5e-3 if half else 1e-5)


def test_only_a_row_whose_gradient_is_too_small_for_its_delta_needs_a_second_call(monkeypatch) -> None:
    q, k, v, dout = tile_inputs(8, 8, 2, 2, 16, torch.float32)
    out, lse = REFERENCE.forward(q, k, v, CAUSAL, 0.25)
    given = [t.cpu() for t in BackwardInputs(q, dout, lse, row_dot(dout, out) + 100, k, v)]
    calls, of_whole = [], CpuKernel.backward_of_whole
    monkeypatch.setattr(CpuKernel, "backward_of_whole", lambda *each: calls.append(each) or of_whole(*each))
    kernel = CpuKernel(takes_delta=True)
    kernel.backward(BackwardInputs(*given), CAUSAL, 0.25, False)
    assert len(calls) == 1
    given[1][0, 3, 1] *= 1e-6
    kernel.backward(BackwardInputs(*given), CAUSAL, 0.25, False)
    assert len(calls) == 3


@pytest.mark.parametrize("broken", [torch.inf, torch.nan])
def test_a_delta_that_is_no_number_is_not_lost(broken) -> None:
    q, k, v, dout = (t.cpu() for t in tile_inputs(8, 8, 2, 2, 16, torch.float32))
    dout[0, 3, 1] = 0
    out, lse = REFERENCE.forward(q, k, v, CAUSAL, 0.25)
    delta = row_dot(dout, out)
    delta[0, 1, 3] = broken
    dq, _, dv = CpuKernel(takes_delta=True).backward(BackwardInputs(q, dout, lse, delta, k, v), CAUSAL, 0.25, False)
    assert not torch.isfinite(dq[0, 3, 1]).any()
    assert torch.isfinite(dq[1]).all()
    assert torch.isfinite(dv).all()


def test_merging_survives_scores_far_apart_and_rows_without_keys() -> None:
    parts = [
        (torch.ones(1, 3, 1, 4, device=DEVICE), torch.tensor([[[-3e4, 3e4, -torch.inf]]], device=DEVICE)),
        (torch.full((1, 3, 1, 4), 5.0, device=DEVICE), torch.tensor([[[0.0, 0.0, -torch.inf]]], device=DEVICE)),
    ]
    parts[0][0][:, 2], parts[1][0][:, 2] = 0, 0
    out, lse = torch.empty(1, 3, 1, 4, device=DEVICE), torch.empty(1, 1, 3, device=DEVICE)
    merge_parts(parts, out, lse)
    assert out[0, :, 0, 0].tolist() == [5.0, 1.0, 0.0]
    assert lse.flatten().tolist() == [0.0, 3e4, -torch.inf]
    merge_parts([], out, lse)
    assert out.abs().max() == 0
    assert lse.flatten().tolist() == [-torch.inf] * 3


@pytest.mark.parametrize("count", range(1, 9))
def test_merging_many_parts_in_any_grouping_gives_attention_over_all_keys(count) -> None:
    q, k, v, _ = tile_inputs(32, 8 * count, 4, 4, 64, torch.float32)
    running = OutputAccumulator(q)
    for part in range(count):
        keys, rows = slice(8 * part, 8 * part + 8), slice(0 if part % 3 else 16, 32)
        running.update(rows, *REFERENCE.forward(q[:, rows], k[:, keys], v[:, keys], FULL, 0.125))
        if rows.start:
            running.update(slice(0, 16), *REFERENCE.forward(q[:, :16], k[:, keys], v[:, keys], FULL, 0.125))
    out, lse = running.result()
    whole, whole_lse = REFERENCE.forward(q, k, v, FULL, 0.125)
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("count", range(9))
def test_gradient_parts_of_any_rows_are_summed_and_release_their_memory_once(count) -> None:
    generator = torch.Generator().manual_seed(count)
    like = torch.zeros(2, 12, 3, 8, dtype=torch.bfloat16, device=DEVICE)
    expected, released = torch.zeros(like.shape, dtype=torch.float64), []
    total = GradAccumulator(like, torch.bfloat16)
    for index in range(count):
        rows = slice((index * 5) % 8, 12 - index % 4)
        part = torch.randn(2, rows.stop - rows.start, 3, 8, generator=generator).bfloat16()
        expected[:, rows] += part.double()
        total.add(rows, part.to(DEVICE), lambda index=index: released.append(index))
    wide = total.total().clone()
    assert wide.dtype == torch.float32
    torch.testing.assert_close(wide.double().cpu(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(total.final(torch.bfloat16), wide.bfloat16())
    assert released == list(range(count))


def test_a_single_part_crosses_a_link_as_the_kernel_wrote_it_and_a_sum_crosses_wide() -> None:
    like = torch.zeros(1, 8, 2, 4, dtype=torch.bfloat16)
    part, rows = torch.randn(1, 4, 2, 4).bfloat16(), slice(4, 8)
    gradient = GradAccumulator(like, torch.bfloat16)
    gradient.add(rows, part)
    assert gradient.over(rows, None, unreduced=True) is part
    assert gradient.spec(rows, None, unreduced=True).dtype == torch.bfloat16
    gradient.add(rows, part)
    assert (
        gradient.over(rows, None, unreduced=False).dtype
        == gradient.spec(rows, None, unreduced=False).dtype
        == torch.float32
    )
    assert torch.equal(gradient.over(rows, None, unreduced=False), part.float() * 2)


def test_a_part_in_a_receive_slot_is_copied_and_the_slot_released() -> None:
    slot, released = torch.randn(1, 8, 2, 4).bfloat16(), []
    gradient = GradAccumulator(torch.zeros(1, 8, 2, 4, dtype=torch.bfloat16), torch.bfloat16)
    gradient.add(slice(0, 8), slot, lambda: released.append(True))
    final = gradient.final(torch.bfloat16)
    assert torch.equal(final, slot)
    assert final.data_ptr() != slot.data_ptr()
    assert released == [True]


def test_merging_parts_of_other_rows_is_refused() -> None:
    out, lse = torch.zeros(1, 4, 2, 8), torch.zeros(1, 2, 4)
    with pytest.raises(ValueError, match="does not fit"):
        merge_parts([(out[:, :3], lse[:, :, :3])], out, lse)


def test_every_kernel_has_an_availability_and_a_reason() -> None:
    lines = {line.name: line for line in available()}
    assert set(lines) == set(KERNELS)
    assert lines["reference"].ok
    assert all(line.sentence for line in lines.values())


def test_a_kernel_that_cannot_run_is_refused_not_replaced() -> None:
    problem = KernelProblem(device=torch.device("cpu"), dtype=torch.float32, heads=4, kv_heads=4, head_dim=64)
    with pytest.raises(ValueError, match="fa4"):
        choose_kernel("fa4", problem)
    with pytest.raises(ValueError, match="unknown"):
        choose_kernel("fa5", problem)
    assert choose_kernel("auto", problem).name == "cpu"


def test_fa4_keeps_what_it_compiles_in_a_folder_of_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "cache"))
    environment: dict[str, str] = {}
    keep_compiled(environment)
    folder = tmp_path / "cache" / "flash_attention_4"
    assert environment == {
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(folder),
    }
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


@pytest.mark.parametrize("name", ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"])
def test_fa4_compiles_where_the_user_says(name, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "cache"))
    environment = {name: "0"}
    keep_compiled(environment)
    assert environment == {name: "0"}
    assert not (tmp_path / "cache").exists()


def test_fa4_compiles_in_each_process_where_no_folder_can_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setenv("BURST_CACHE", str(tmp_path / "cache"))
    environment: dict[str, str] = {}
    keep_compiled(environment)
    assert environment == {}

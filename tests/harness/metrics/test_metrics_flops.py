"""The FLOP formula against numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.settings import Checkpoint, TrialSettings
from engine.shape import LinearKind, ModelShape
from harness.metrics.flops import seconds_at_kernel_speed, tokens_per_step, visible_pairs, work_of, work_on_documents
from tests.harness.synthetic_records import LARGE, SMALL, settings

# hidden 4, 2 query heads and 1 KV head of 2, gated MLP of 3, vocabulary 5, 2 layers.
# One layer: q 4x4, k 4x2, v 4x2, o 4x4 = 48; MLP 3 x 4 x 3 = 36; together 84.
TOY = ModelShape(name="toy", layers=2, hidden=4, ffn=3, heads=2, kv_heads=1, head_dim=2, vocab=5)


@pytest.mark.parametrize(
    ("mask", "pairs"),
    [("full", 36), ("causal", 21), ("sliding_window:0", 6), ("sliding_window:2", 15), ("sliding_window:1:2", 20)],
)
def test_visible_pairs_of_six_tokens_match_the_count_by_hand(mask: str, pairs: int) -> None:
    assert visible_pairs(mask, 6) == pairs


@pytest.mark.parametrize(
    ("mask", "left", "right"),
    [("full", 99, 99), ("causal", 99, 0), ("sliding_window:3", 3, 0), ("sliding_window:2:4", 2, 4)],
)
@pytest.mark.parametrize("seq_len", [1, 2, 7, 16])
def test_visible_pairs_equal_a_count_over_the_whole_grid(mask: str, left: int, right: int, seq_len: int) -> None:
    grid = sum(i - left <= j <= i + right for i in range(seq_len) for j in range(seq_len))
    assert visible_pairs(mask, seq_len) == grid


def test_causal_pairs_are_exact_at_a_million_tokens() -> None:
    assert visible_pairs("causal", 1 << 20) == (1 << 20) * ((1 << 20) + 1) // 2


def test_training_forward_matches_the_hand_count() -> None:
    work = work_of(settings(model=TOY, seq_len=6, batch_size=3, world_size=2, cp_size=1))
    # 6 tokens x 3 sequences x 2 replicas = 36 tokens; 21 causal pairs in each of 6 sequences.
    assert work.layers == 2 * 36 * 2 * 84
    assert work.head == 2 * 36 * 5 * 4
    assert work.attention == 4 * 2 * 2 * 21 * 2 * 6
    assert work.forward == 12096 + 1440 + 4032
    assert work.model == 3 * 17568


@pytest.mark.parametrize(("kind", "matrices", "products"), [("gated_delta_net", 220, 90), ("mamba2", 208, 60)])
def test_a_linear_layer_counts_its_matrices_and_the_recurrence_but_no_attention(
    kind: LinearKind, matrices: int, products: int
) -> None:
    """One layer of attention and one linear layer of 3 value heads with a state of 2 x 5, and 1 key head.

    Linear matrices: q 4x2, k 4x2, v 4x15, gate 4x15, output 15x4, decay 4x3, for the delta rule beta 4x3; with the MLP
    of 36 together 256, or 244. The state has 30 elements: written, read, and by the delta rule read once more.
    """
    model = replace(TOY, layer_pattern="lf", linear=kind, linear_heads=3, linear_key_heads=1, linear_key_dim=2,
                    linear_value_dim=5)  # fmt: skip
    work = work_of(settings(model=model, seq_len=6, batch_size=3, world_size=2, cp_size=1))
    assert work.layers == 2 * 36 * (84 + matrices + 36 + products)
    assert work.attention == 4 * 2 * 2 * 21 * 1 * 6
    again = work_of(settings(model=model, seq_len=6, batch_size=3, world_size=2, cp_size=1,
                             checkpoint=Checkpoint(every=1, tail=0.0)))  # fmt: skip
    ends = 2 * 4 * 3  # of both MLPs, whose last products are not repeated
    assert again.recomputed_layers == 2 * 36 * (84 + matrices + 36 + products - ends)
    assert again.recomputed_attention == work.attention


def test_micro_batches_are_sequences_of_the_step() -> None:
    big = settings(model=TOY, seq_len=6, batch_size=6, world_size=2, cp_size=1)
    parts = settings(model=TOY, seq_len=6, batch_size=2, gradient_accumulation=3, world_size=2, cp_size=1)
    assert work_of(parts) == work_of(big)
    assert tokens_per_step(parts) == tokens_per_step(big) == 6 * 6 * 2
    call = settings(task="attention", model=TOY, seq_len=6, batch_size=2, gradient_accumulation=3)
    assert work_of(call) == work_of(settings(task="attention", model=TOY, seq_len=6, batch_size=2))


def test_packed_rows_count_their_tokens_and_the_pairs_that_documents_show() -> None:
    # Two rows of 6 tokens, of documents of 2 and 3 tokens and of 4: 9 tokens, 3 + 6 + 10 causal pairs, 3 of padding.
    packed = settings(model=TOY, seq_len=6, batch_size=2, world_size=1, cp_size=1, mask="documents", layout="auto")
    work = work_on_documents(work_of(packed), packed, 9, 19)
    assert work.layers == pytest.approx(2 * 9 * 2 * 84)
    assert work.head == pytest.approx(2 * 9 * 5 * 4)
    assert work.attention == pytest.approx(4 * 2 * 2 * 19 * 2)


def test_tiles_repeat_the_mlp_up_to_its_last_matrix_unless_the_layer_is_recomputed_anyway() -> None:
    kept = settings(model=TOY, seq_len=6, mlp_tiles=2, checkpoint=Checkpoint(every=0, mlp=0.0))
    assert work_of(kept).recomputed_layers == 2 * 6 * 2 * (2 * 4 * 3)  # tokens, layers, gate and up
    assert work_of(kept).model == work_of(settings(model=TOY, seq_len=6)).model
    assert work_of(settings(model=TOY, seq_len=6, checkpoint=Checkpoint(every=0))).recomputed_layers == 0
    recomputed = settings(model=TOY, seq_len=6, mlp_tiles=2)
    assert work_of(recomputed) == work_of(settings(model=TOY, seq_len=6))


def test_tiled_projections_repeat_queries_and_keys_where_these_are_normed() -> None:
    plain, normed = TOY, replace(TOY, qk_norm=True)
    for every in (0, 1):
        checkpoint = Checkpoint(every=every)
        again = [
            work_of(settings(model=model, seq_len=6, projection_tiles=tiles, checkpoint=checkpoint)).recomputed_layers
            for model in (plain, normed)
            for tiles in (1, 2)
        ]
        assert again[0] == again[1] == again[2]
        assert again[3] - again[2] == 2 * 6 * 2 * (4 * (2 + 1) * 2)  # tokens, layers, hidden x (N + K) x D


def test_an_ungated_mlp_has_two_matrices() -> None:
    ungated = ModelShape(name="g", layers=1, hidden=4, ffn=3, heads=2, kv_heads=1, head_dim=2, vocab=5, gated=False)
    assert ungated.layer_matrices == 48 + 2 * 4 * 3


def test_norms_of_queries_and_keys_are_parameters_but_no_work() -> None:
    normed = replace(TOY, qk_norm=True)
    assert normed.parameters == TOY.parameters + TOY.layers * 2 * TOY.head_dim
    assert work_of(settings(model=normed, seq_len=6)) == work_of(settings(model=TOY, seq_len=6))


def test_grouped_heads_do_not_change_attention_work() -> None:
    grouped = work_of(settings(task="attention", model=LARGE))
    whole = ModelShape(name="w", layers=16, hidden=2048, ffn=8192, heads=16, kv_heads=16, head_dim=128, vocab=32000)
    assert grouped == work_of(settings(task="attention", model=whole))


def test_attention_alone_is_quoted_at_three_and_a_half_forwards() -> None:
    work = work_of(settings(task="attention", model=TOY, seq_len=6))
    assert work.forward == 4 * 2 * 2 * 21
    assert work.kernel == 3.5 * work.forward
    assert work.model == 3 * work.forward
    assert work.hardware == work.kernel


def test_cp_size_does_not_change_the_work_of_a_step() -> None:
    assert work_of(settings(cp_size=1)) == work_of(settings(cp_size=4))


def last_matrices(trial: TrialSettings) -> float:
    """One run of the MLPs' last matrices, which a recomputation leaves out."""
    model = trial.model
    return 2 * tokens_per_step(trial) * model.layers * model.ffn * model.hidden


@pytest.mark.parametrize(
    ("every", "tail", "layers_again", "attention_again"),
    [(0, 1.0, 0, 0), (0, 0.0, 0, 0), (1, 1.0, 1, 0), (1, 0.0, 1, 1)],
)
def test_recomputation_counts_in_hardware_flops_only(every, tail, layers_again, attention_again):
    work = work_of(settings(model=SMALL, checkpoint=Checkpoint(every=every, tail=tail)))
    again = layers_again * (work.layers - last_matrices(settings(model=SMALL))) + attention_again * work.attention
    assert work.hardware - work.kernel == again
    assert work.model == work_of(settings(model=SMALL, checkpoint=Checkpoint(every=0))).model


def test_a_fractional_tail_repeats_the_pairs_of_the_head_alone() -> None:
    work = work_of(settings(model=TOY, seq_len=8, checkpoint=Checkpoint(tail=0.25)))
    assert work.recomputed_attention == work.attention * 21 / 36  # 6 of 8 queries: 6 x 7 / 2 of 8 x 9 / 2 pairs
    full = work_of(settings(model=TOY, seq_len=8, mask="full", checkpoint=Checkpoint(tail=0.25)))
    assert full.recomputed_attention == 0.75 * full.attention


def test_groups_of_layers_run_all_but_their_last_layer_twice() -> None:
    five = replace(TOY, layers=5)
    layer, last = work_of(settings(model=five)).layers / 5, last_matrices(settings(model=five))
    for every, repeated in ((1, 5), (2, 5 + 2), (3, 5 + 3), (9, 5 + 4)):
        work = work_of(settings(model=five, checkpoint=Checkpoint(every=every, tail=0.0)))
        assert work.recomputed_layers == pytest.approx(repeated * layer - last)
        assert work.recomputed_attention == work.attention  # found computed the second time


def test_bisection_runs_layers_and_their_attention_again_more_often() -> None:
    nine = replace(TOY, layers=9)  # a group of 8 and one of 1
    layer, last = work_of(settings(model=nine)).layers / 9, last_matrices(settings(model=nine))
    work = work_of(settings(model=nine, checkpoint=Checkpoint(every=8, tail=0.0, replay="bisect")))
    # To place 7 seven layers are run, to 5 one from 4, to 3 three, to 1 one; 6, 4 and 2 were kept on the way.
    assert work.recomputed_layers == pytest.approx((9 + 12) * layer - last)
    assert work.recomputed_attention == pytest.approx((9 + 12) / 9 * work.attention)
    every = work_of(settings(model=nine, checkpoint=Checkpoint(every=1, tail=0.0, replay="bisect")))
    assert every == work_of(settings(model=nine, checkpoint=Checkpoint(every=1, tail=0.0)))


def test_fused_lm_head_repeats_nothing() -> None:
    assert work_of(settings(lm_head_fusion=True)) == work_of(settings(lm_head_fusion=False))


def test_attention_at_kernel_speed_reproduces_the_published_ceiling() -> None:
    """660 TFLOP/s forward and 625 backward bound model FLOPs to 3 / (1/660 + 2.5/625) = 544 TFLOP/s."""
    work = work_of(settings(task="attention", model=LARGE, seq_len=65536))
    seconds = seconds_at_kernel_speed(work, gemm=796, attention_forward=660, attention_backward=625)
    assert work.model / seconds / 1e12 == pytest.approx(543.96, abs=0.01)


def test_flops_of_the_published_7b_shape_match_the_paper_formula() -> None:
    """F(S) = 12 S L h^2 (1 + Hkv/H + c S/h + 1.5 f/h + V/(2 L h)), c = 0.5; ours counts the diagonal in full."""
    model = ModelShape(name="7b", layers=32, hidden=4096, ffn=11008, heads=32, kv_heads=32, head_dim=128, vocab=32000)
    s, h, layers = 1 << 20, 4096, 32
    published = 12 * s * layers * h**2 * (2 + 0.5 * s / h + 1.5 * 11008 / h + 32000 / (2 * layers * h))
    diagonal = 3 * 4 * 32 * 128 * (s / 2) * layers  # S(S+1)/2 instead of S^2/2
    assert work_of(settings(model=model, seq_len=s)).model == pytest.approx(published + diagonal, rel=1e-12)

"""What a rank does with a case: tensors lie on the device that was asked, and wrong returned values have a sentence."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from baselines.stand_ins import FLASH_ATTN, FOLDER, import_flash_attn_stand_in
from conform.answer import answer
from conform.cases import case_named
from conform.run import ERROR, backend_of, run
from conform.target import load

ATTENTION = """
NAME, VERSION, RANKS, CAPABILITIES = "mine", "1.0", (1,), ("causal",)
def shard(whole, dim, problem): return whole
def attention(q, k, v, problem): return q * k * v
def gather(part, dim, problem): return part
"""
TRAINING = """
NAME, VERSION, RANKS, CAPABILITIES = "mine", "1.0", (1,), ("causal", "evaluation")
def make_model(problem): return None
def shard(batch, problem): return batch
def step(model, parts, problem): return 1.0
def gather(model, problem): return problem.state
def evaluate(model, part, problem): return 1.0
"""


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """This process as the only rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def written(folder: Path, text: str, name: str = "mine") -> str:
    (folder / f"{name}.py").write_text(text)
    return str(folder / f"{name}.py")


@pytest.mark.parametrize(
    ("right", "wrong", "sentence"),
    [
        ("return whole", "return None", "shard returned NoneType, expected a tensor"),
        ("return q * k * v", "return None", "attention returned NoneType, expected a tensor"),
        ("return q * k * v", "return q, None", "attention returned tuple, expected a tensor"),
        (
            "return q * k * v",
            "return q.transpose(1, 2)",
            r"attention returned the shape \[1, 8, 64, 8\], expected \[1, 64, 8, 8\]: \[batch, tokens, heads, head",
        ),
        ("return q * k * v", "return q.detach()", "an output without a gradient, expected one that is differentiable"),
        ("return part", "return None", "gather returned NoneType, expected a tensor"),
        ("return 1.0", "return None", "step returned NoneType, expected the loss as one number"),
        (
            "return 1.0",
            "return problem.state['model.norm.weight']",
            r"step returned Tensor of shape \[32\], expected the",
        ),
        (
            "part, problem): return 1.0",
            "part, problem): return 'low'",
            "evaluate returned str, expected the loss as one",
        ),
        ("return problem.state", "return []", "gather returned list, expected a dictionary of gradients by parameter"),
        ("return problem.state", "return {'a': None}", r"gather\['a'\] returned NoneType, expected a tensor"),
    ],
)
def test_a_returned_value_of_the_wrong_kind_is_told_in_a_sentence(
    right: str, wrong: str, sentence: str, tmp_path: Path, alone: None
) -> None:
    text = ATTENTION if right in ATTENTION else TRAINING
    case = case_named("causal" if text == ATTENTION else "evaluation" if "part" in right else "step")
    answer(load(written(tmp_path, text)), case, "cpu")
    with pytest.raises((TypeError, ValueError), match=sentence):
        # Python takes a file of the same size and second for the one that it has compiled.
        answer(load(written(tmp_path, text.replace(right, wrong, 1), "wrong")), case, "cpu")


# Tensors on the device `meta` have shapes and no numbers, so each function notes where they lie and returns others.
WHERE = """
import torch
SEEN = set()
def seen(*tensors): SEEN.update(each.device.type for each in tensors)
"""
ATTENTION_ELSEWHERE = (
    WHERE
    + ATTENTION
    + """
def shard(whole, dim, problem):
    seen(whole)
    assert problem.device == "meta"
    return whole if whole.shape[-1] > 1 else torch.ones(whole.shape)  # which tokens a rank holds: numbers are read
def attention(q, k, v, problem):
    seen(q, k, v, *([] if problem.sinks_N is None else [problem.sinks_N]))
    return q * k * v
def gather(part, dim, problem):
    seen(part)
    return torch.zeros(part.shape)
"""
)
TRAINING_ELSEWHERE = (
    WHERE
    + TRAINING
    + """
def make_model(problem): seen(*problem.state.values())
def shard(batch, problem):
    seen(*batch.values())
    return ()
def gather(model, problem): return {name: torch.zeros(each.shape) for name, each in problem.state.items()}
"""
)


@pytest.mark.parametrize(
    "name",
    [
        *("causal", "window", "documents-leak", "crossed-backwards", "strided-inputs", "called-again", "after-no-grad"),
        *("step", "padding-both", "accumulation", "evaluation", "two-models", "other-documents", "second-step"),
    ],
)
def test_every_tensor_that_a_target_gets_lies_on_the_device_that_was_asked(
    name: str, tmp_path: Path, alone: None
) -> None:
    case = case_named(name)
    target = load(written(tmp_path, ATTENTION_ELSEWHERE if case.kind == "attention" else TRAINING_ELSEWHERE))
    found = answer(target, case, "meta")
    assert target.module.SEEN == {"meta"}  # noqa: SIM300 - a set of the file's, no constant
    assert {each.device.type for result in found.results for each in result.values()} == {"cpu"}


def test_ranks_ask_a_target_on_their_device(tmp_path: Path) -> None:
    text = ATTENTION.replace("return whole", "raise RuntimeError(f'{whole.device} for {problem.device}')")
    [result] = run(load(written(tmp_path, text)), [case_named("causal")], device="meta")
    assert (result.status, result.sentences) == (ERROR, ("rank 0: RuntimeError: meta for meta",))


@pytest.mark.parametrize(("device", "installed", "stand_in"), [("cpu", True, 1), ("cuda", True, 0), ("cuda", False, 1)])
def test_gpu_ranks_import_flash_attn_itself_where_it_is_installed(
    device: str, installed: bool, stand_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    for _ in range(2):
        import_flash_attn_stand_in(device)
    assert sys.path.count(str(FOLDER / FLASH_ATTN)) == stand_in


def test_ranks_that_share_a_gpu_are_connected_by_gloo() -> None:
    assert [backend_of("cuda", ranks, 2) for ranks in (1, 2, 3)] == ["nccl", "nccl", "gloo"]
    assert backend_of("cpu", 4, 0) == "gloo"
    with pytest.raises(ValueError, match="needs a GPU, and torch finds none here"):
        backend_of("cuda", 1, 0)

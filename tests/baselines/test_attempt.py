"""Attempts at the paper's programs: what is started, how an end is read; and stand-ins compute what they stand for."""

from __future__ import annotations

import importlib.util
import os
import pickle
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from baselines.attempt import SYSTEMS, failing_line, main, write_burst_data, write_megatron_data
from baselines.stand_ins import FOLDER, python_path

PROGRAM = "BurstEngine/apps/llama/pretrain_llama_hug_tokenizer.py"
STEP = "|mem_train_allocated: {0}.0000 |mem_train_reserved: 2.0000 | train: 0.5000 | tflops: 3.00 | toks: 4.00 | more |"


def source(folder: Path, program: str) -> Path:
    """A checkout whose program is the given one."""
    path = folder / "source" / PROGRAM
    path.parent.mkdir(parents=True)
    path.write_text(program, encoding="utf-8")
    return folder / "source"


def test_an_attempt_that_trains_prints_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = f"""
import os, sys
import flash_attn.flash_attn_interface
assert os.environ["WORLD_SIZE"] == "1" and "none" in sys.argv and "burst" not in sys.argv
for step in (1, 2):
    print("loss 5.2500 grad_norm 1.0000")
    print("{STEP}".format(step))
"""
    folder = tmp_path / "out"
    words = ["burst_engine", "--source", str(source(tmp_path, program)), "--out", str(folder), "--word", "burst=none"]
    assert main(words) == 0, (folder / "output.log").read_text()
    out = capsys.readouterr().out
    assert "2 losses 5.2500, 5.2500" in out
    assert '"mem_train_allocated": 2.0' in out


def test_an_attempt_that_fails_names_the_file_and_line_of_the_system(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = "import importlib\n\n\ndef start():\n    importlib.import_module('no_such_package')\n\n\nstart()\n"
    words = ["burst_engine", "--source", str(source(tmp_path, program)), "--out", str(tmp_path / "out")]
    assert main(words) == 1
    out = capsys.readouterr().out
    assert f"{PROGRAM}:5 in start: ModuleNotFoundError: No module named 'no_such_package'" in out


def test_an_attempt_ends_when_its_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program = "import subprocess, time\nsubprocess.Popen(['sleep', '600'])\ntime.sleep(600)\n"
    words = ["burst_engine", "--source", str(source(tmp_path, program)), "--out", str(tmp_path / "out")]
    assert main([*words, "--seconds", "2"]) == 1
    assert "failed at no traceback after 2 s" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--source", "/no/such/folder"], "no such folder exists"),
        (["--source", "."], f"which has no {PROGRAM}; name the folder that its pin names"),
        (["--word", "burst"], "--word is burst; expected OLD=NEW"),
        (["--path", "/no/such/folder"], "--path is /no/such/folder, and no such folder exists"),
        (["--seq-len", "0"], "--seq-len is 0; give at least one token"),
        (["--seconds", "-3"], "--seconds is -3; give a number above 0"),
        (["--seconds", "nan"], "--seconds is nan; give a number above 0"),
        (["--out", "/dev/null/out"], "--out is /dev/null/out, which cannot be written (Not a directory)"),
        (["--out", "."], "--out is ., which is not empty; name a new folder"),
    ],
)
def test_wrong_words_are_refused_before_anything_starts(
    words: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    program = source(tmp_path, "raise SystemExit('started')\n")
    with pytest.raises(SystemExit) as ended:
        main(["burst_engine", "--source", str(program), *words])
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_a_system_that_the_paper_has_no_program_of_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["torchtitan", "--source", "."])
    assert "invalid choice: 'torchtitan'" in capsys.readouterr().err


def test_the_last_traceback_counts_and_the_systems_own_line_is_named(tmp_path: Path) -> None:
    own = tmp_path / "megatron" / "training.py"
    text = f"""Traceback (most recent call last):
  File "{tmp_path}/first.py", line 1, in <module>
ValueError: first
[rank0]: Traceback (most recent call last):
[rank0]:   File "{own}", line 57, in pretrain
[rank0]:     helper()
[rank0]:   File "/usr/lib/python3/site-packages/torch/helper.py", line 9, in helper
[rank0]: torch.OutOfMemoryError: CUDA out of memory
Exception ignored in: <function Loader.__del__ at 0x7e>
Traceback (most recent call last):
  File "{tmp_path}/loader.py", line 3, in __del__
AttributeError: workers
"""
    assert failing_line(text, tmp_path) == (
        "site-packages/torch/helper.py:9 in helper, called at megatron/training.py:57 in pretrain: "
        "torch.OutOfMemoryError: CUDA out of memory"
    )
    assert failing_line("nothing went wrong\n", tmp_path) == ""


def test_the_data_of_attempts_have_the_systems_formats(tmp_path: Path) -> None:
    write_megatron_data(tmp_path / "data")
    index, tokens = (tmp_path / "data.idx").read_bytes(), (tmp_path / "data.bin").read_bytes()
    version, code, sequences, documents = struct.unpack("<QBQQ", index[9:34])
    assert (index[:9], version, code, documents) == (b"MMIDIDX\x00\x00", 1, 8, sequences + 1)
    assert len(index) == 34 + 4 * sequences + 8 * sequences + 8 * documents
    assert len(tokens) == 2 * sum(struct.unpack(f"<{sequences}i", index[34 : 34 + 4 * sequences]))
    write_burst_data(tmp_path / "burst")
    block = (tmp_path / "burst" / "text").read_bytes()
    size = struct.unpack("I", block[1:5])[0]
    assert block[0] == 0x1F
    assert set(pickle.loads(block[5 : 5 + size])) == {"input", "<ans>"}
    assert len(block) == 1 << 20


@pytest.mark.parametrize("system", SYSTEMS)
def test_every_stand_in_is_there_and_says_what_it_stands_for(system: str) -> None:
    for name in SYSTEMS[system]:
        paths = [FOLDER / name / path for path in ("sitecustomize.py", f"{name}.py", f"{name}/__init__.py")]
        path = next(each for each in paths if each.exists())
        assert path.read_text(encoding="utf-8").startswith('"""Stands for ')


CHECK = """
import torch
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import _flash_attn_backward, _flash_attn_forward, flash_attn_varlen_func
from apex.normalization import MixedFusedRMSNorm

torch.manual_seed(0)
q = torch.randn(1, 96, 4, 32, requires_grad=True)
k, v = (torch.randn(1, 96, 2, 32, requires_grad=True) for _ in range(2))
dout = torch.randn(1, 96, 4, 32)


def dense(q, k, v):
    k, v = (each.repeat_interleave(2, dim=2) for each in (k, v))
    scores = torch.einsum("blnd,bmnd->bnlm", q, k).double() * 32**-0.5
    scores = scores.masked_fill(torch.ones(96, 96, dtype=torch.bool).triu(1), float("-inf"))
    return torch.einsum("bnlm,bmnd->blnd", scores.softmax(-1), v.double()), scores.logsumexp(-1)


truth, lse = dense(q, k, v)
wanted = torch.autograd.grad(truth, (q, k, v), dout.double())
out = flash_attn_func(q, k, v, causal=True)
torch.testing.assert_close(out.double(), truth, atol=1e-5, rtol=1e-5)
for found, want in zip(torch.autograd.grad(out, (q, k, v), dout), wanted):
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
raw = _flash_attn_forward(q.detach(), k.detach(), v.detach(), 0.0, None, causal=True, window_size=(-1, -1))
torch.testing.assert_close(raw[5].double(), lse.detach(), atol=1e-5, rtol=1e-5)
into = [torch.empty_like(each) for each in (q, k, v)]
_flash_attn_backward(dout, *(each.detach() for each in (q, k, v)), raw[0], raw[5], *into, 0.0, None, causal=True)
for found, want in zip(into, wanted):
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)
bounds = torch.tensor([0, 96], dtype=torch.int32)
packed = flash_attn_varlen_func(q[0], k[0], v[0], bounds, bounds, 96, 96, causal=True)
torch.testing.assert_close(packed[None], out)
try:
    flash_attn_func(q, k, v, causal=True, window_size=(16, 0))
except NotImplementedError as error:
    assert "no window_size" in str(error)
else:
    raise AssertionError("a window was accepted")
hidden = torch.randn(3, 8)
norm = MixedFusedRMSNorm(8, eps=1e-6)
torch.testing.assert_close(norm(hidden), hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt())
print("all as they should be")
"""


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_the_stand_in_for_flash_attention_computes_attention() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CHECK],
        env={
            **os.environ,
            "PYTHONPATH": python_path(["flash_attn", "apex"]),
            "FLASH_ATTN_STAND_IN": "2.6",
            "FLASH_ATTN_STAND_IN_ATTEMPT": "1",
        },
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.stdout == "all as they should be\n", done.stderr[-2000:]

"""`burst train` on the packed documents and chats of examples/, end to end on CPU ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.cli import main

EXAMPLES = Path(__file__).parents[3] / "examples"
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def trained(*changes: str) -> list[dict[str, float]]:
    """Three steps on two ranks; their lines of metrics."""
    fixed = ("steps=3", "lr_schedule.warmup=1", "evaluate.every=3", "save.every=0", *changes)
    options = [word for change in fixed for word in ("--set", change)]
    config = str(EXAMPLES / "train_packed.yaml")
    assert main(["train", config, "--launcher", "local", "--out", "run", *options]) == 0
    return [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]


def test_json_lines_are_trained_on_and_their_padding_is_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = str(EXAMPLES / "documents.jsonl")
    assert main(["train", "data", lines, "--out", "store"]) == 2
    refusal = capsys.readouterr().err
    assert refusal.endswith(f"make a store of one field with: burst train data {lines} --field text --out store\n")
    assert main(["train", "data", lines, "--field", "text", "--validation", "0.2", "--out", "store"]) == 0
    assert "tokens of 32 documents" in capsys.readouterr().out
    steps = [line for line in trained() if line["kind"] == "step"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    told = "".join(capsys.readouterr())
    assert told.index("26 documents in 12 rows of 320 tokens, 9.2% of them padding") < told.index("of 3")
    assert main(["status", "run"]) == 0
    assert "% of the rows padding; evaluation loss" in capsys.readouterr().out


def test_chats_are_trained_on_by_the_tokenizers_own_template(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    byte_level = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = {letter: number for number, letter in enumerate(sorted(byte_level.alphabet()))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    tokenizer.pre_tokenizer = byte_level
    tokenizer.save("tokenizer.json")
    Path("tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    chats = str(EXAMPLES / "chats.jsonl")
    build = ["train", "data", chats, "--field", "messages", "--tokenizer", "tokenizer.json", "--validation", "0.3"]
    assert main([*build, "--out", "store"]) == 0
    assert "tokens of 8 documents" in (told := capsys.readouterr().out)
    assert ", answers of chats alone are learnt\n" in told
    trained("evaluate.sequences=1", "seq_len=301")
    assert main(["train", str(EXAMPLES / "train_packed.yaml"), "--launcher", "local", "--set", "mask=causal"]) == 2
    assert "set mask to documents" in capsys.readouterr().err

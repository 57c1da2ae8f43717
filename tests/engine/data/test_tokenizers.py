"""Token stores of other tokenizers than bytes, and how long texts are cut for them."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from engine.data import TokenStore, open_tokens
from engine.data.store import build_store, token_type
from engine.data.tokenizers import ByteTokenizer, FileTokenizer, cut_at_lines, tokenizer_named
from harness.cli import main

tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")

TEXT = "def größe(x):\n    return x * 2\n\n\nA class is a sentence; a class\thas methods.\n" * 200


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory) -> Path:
    """A byte-level BPE as GPT-2's, trained here, with an end-of-text token and a leftover length limit."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.enable_truncation(8)
    path = tmp_path_factory.mktemp("tok") / "small.json"
    tokenizer.save(str(path))
    return path


def text_file(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def test_a_store_holds_the_librarys_tokens_of_the_whole_text(tmp_path: Path, tokenizer_file: Path) -> None:
    first, second = text_file(tmp_path, "a.txt", TEXT), text_file(tmp_path, "b.txt", "another\n")
    tokenizer = tokenizer_named(str(tokenizer_file))
    header = build_store([first, second], tmp_path / "store", tokenizer, validation=0.1)
    backend = tokenizers.Tokenizer.from_file(str(tokenizer_file))
    backend.no_truncation()
    end = backend.token_to_id("<|endoftext|>")
    expected = [*backend.encode(TEXT).ids, end, *backend.encode("another\n").ids, end]
    store = open_tokens(str(tmp_path / "store"))
    assert store.window(0, len(expected)).tolist() == expected
    assert header.count == len(expected)
    assert (header.tokenizer, header.dtype, header.end_of_text) == ("small.json", "uint16", end)
    assert header.vocabulary == backend.get_vocab_size() > 256
    assert [source["name"] for source in header.sources] == ["a.txt", "b.txt"]
    assert sum(source["tokens"] for source in header.sources) == header.count
    assert (tmp_path / "store" / "tokens.bin").stat().st_size == 2 * header.count


def test_the_models_own_configuration_names_the_end_of_text(tmp_path: Path, tokenizer_file: Path) -> None:
    content = json.loads(tokenizer_file.read_text())
    content["added_tokens"].append({**content["added_tokens"][0], "id": 500, "content": "<stop>"})
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "<stop>"}}))
    tokenizer = FileTokenizer(tmp_path / "tokenizer.json")
    plain = FileTokenizer(tokenizer_file)
    assert (tokenizer.end_of_text, tokenizer.vocabulary) == (plain.vocabulary, plain.vocabulary + 1)
    assert tokenizer.name == tmp_path.name
    config.write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json cannot be read"):
        FileTokenizer(tmp_path / "tokenizer.json")


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("piece", [1, 64, 5000, 10**6])
def test_pieces_are_the_text_again_and_end_where_a_line_does(chunk: int, piece: int) -> None:
    data = TEXT[:4000].encode()
    chunks = [data[at : at + chunk] for at in range(0, len(data), chunk)]
    pieces = list(cut_at_lines(chunks, piece))
    assert b"".join(pieces) == data
    assert all(len(part) >= piece for part in pieces[:-1])
    for before, after in itertools.pairwise(pieces):
        assert before.endswith(b"\n")
        assert not before[-2:-1].isspace()
        assert not after[:1].isspace()


def test_a_text_of_one_endless_line_is_cut_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.data.tokenizers._LONGEST_LINE", 100)
    data = ("größe" * 100).encode()
    pieces = list(cut_at_lines([data[at : at + 99] for at in range(0, len(data), 99)], 50))
    assert len(pieces) > 3
    assert "".join(piece.decode() for piece in pieces) == "größe" * 100


@pytest.mark.parametrize(("content", "words"), [(None, "cannot be read"), ("{}", "is no Hugging Face tokenizer")])
def test_a_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str | None, words: str) -> None:
    path = tmp_path / "tokenizer.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        tokenizer_named(str(path))
    assert "give bytes or the path of a tokenizer.json" in str(caught.value)


def test_a_missing_library_is_refused_with_the_line_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(ValueError, match=r"pip install 'burst-harness\[train\]'"):
        FileTokenizer(tokenizer_file)


@pytest.mark.parametrize(
    ("vocabulary", "dtype"), [(256, "uint8"), (257, "uint16"), (65536, "uint16"), (65537, "uint32")]
)
def test_ids_are_stored_as_narrow_as_they_fit(tmp_path: Path, vocabulary: int, dtype: str) -> None:
    class Highest(ByteTokenizer):
        """One token per chunk: the highest id there is."""

        def encode(self, chunks):
            for _ in chunks:
                yield np.array([self.vocabulary - 1], dtype=np.uint32)

    Highest.vocabulary = vocabulary
    assert token_type(vocabulary) == dtype
    build_store([text_file(tmp_path, "a", "a")], tmp_path / "store", Highest())
    assert TokenStore(tmp_path / "store").window(0, 1).tolist() == [vocabulary - 1]


def test_the_next_step_names_no_model_that_is_too_small(tmp_path: Path, tokenizer_file: Path, capsys) -> None:
    text = text_file(tmp_path, "a.txt", TEXT)
    assert main(["train", "data", text, "--tokenizer", str(tokenizer_file), "--out", str(tmp_path / "store")]) == 0
    said = capsys.readouterr().out
    assert "model: tiny" not in said
    assert f"a model with a vocab of at least {open_tokens(str(tmp_path / 'store')).vocabulary}, seq_len: 512" in said

"""Documents of every kind of source: where they start in a store, and which of their tokens are learnt."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.data import TokenStore, open_tokens
from engine.data.sequences import PackedSequences, TokenSpan, joined
from engine.data.store import HEADER_FILE, StoreHeader, build_store, sha256_of_parts
from engine.data.tokenizers import ByteTokenizer, FileTokenizer
from engine.settings import TrialSettings
from engine.shape import ModelShape

TEXTS = ["one", "a second text", "größe"]
CHAT = [
    {"role": "user", "content": "2 + 2?"},
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes, 4."},
]
TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|{{ message.role }}|>{% if message.role == 'assistant' %}"
    "{% generation %}{{ message.content | trim }}{% endgeneration %}{% else %}{{ message.content }}{% endif %}"
    "{% endfor %}"
)


def built(tmp_path: Path, *sources: str | Path, field: str | None = None, tokenizer: Any = None) -> TokenStore:
    build_store(list(map(str, sources)), tmp_path / "store", tokenizer or ByteTokenizer(), field=field)
    return TokenStore(tmp_path / "store")


def texts_of(store: TokenStore) -> list[str]:
    tokens = bytes(store.window(0, store.header.count).tolist())
    return [
        part.decode()
        for part in np.split(np.frombuffer(tokens, np.uint8), store.document_starts[1:])
        for part in [bytes(part)]
    ]


def lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_each_record_is_a_document_and_blank_ones_are_left_out(tmp_path: Path) -> None:
    records = [{"text": text, "id": number} for number, text in enumerate(["", *TEXTS])]
    path = lines(tmp_path / "a.jsonl", records)
    path.write_text(path.read_text() + "\n")
    store = built(tmp_path, path, field="text")
    assert texts_of(store) == TEXTS
    header = store.header
    assert (header.documents, header.answers_only, header.schema) == (3, False, 2)
    assert header.sources[0]["documents"] == 3
    assert sorted(file.name for file in (tmp_path / "store").iterdir()) == [
        "documents.bin",
        "header.json",
        "tokens.bin",
    ]


def test_a_folder_holds_the_documents_of_its_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    (folder / "b").mkdir(parents=True)
    (folder / ".hidden").write_text("no")
    (folder / "b" / "z.txt").write_text("last")
    (folder / "a.txt").write_text("first")
    (folder / "aa.json").write_text(json.dumps([{"text": "in"}, {"text": "between"}]))
    assert texts_of(built(tmp_path, folder, field="text")) == ["first", "in", "between", "last"]


def test_the_built_in_text_has_a_document_for_each_topic(tmp_path: Path) -> None:
    texts = texts_of(built(tmp_path, "python_docs"))
    assert len(texts) > 50
    assert all(text.endswith("\n\n") for text in texts)


def test_a_store_of_the_first_schema_is_read_as_one_document_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b.txt").write_text("second")
    store = built(tmp_path, tmp_path / "a.txt", tmp_path / "b.txt")
    path = tmp_path / "store" / HEADER_FILE
    header = json.loads(path.read_text())
    new = {"schema", "sources", "documents", "documents_sha256", "answers_only", "tokens_sha256"}
    old = {name: value for name, value in header.items() if name not in new}
    texts = [{name: source[name] for name in ("name", "sha256", "tokens")} for source in header["sources"]]
    path.write_text(json.dumps(old | {"documents": texts}))
    (tmp_path / "store" / "documents.bin").unlink()
    assert texts_of(TokenStore(tmp_path / "store")) == ["first", "second"]
    path.write_text(json.dumps(old))  # older still
    assert texts_of(TokenStore(tmp_path / "store")) == ["firstsecond"]
    path.write_text(json.dumps(header | {"schema": 3}))
    with pytest.raises(ValueError, match="its schema is 3, and this version reads up to 2"):
        open_tokens(str(tmp_path / "store"))
    assert store.header == StoreHeader(**header)


def test_tokens_that_a_store_was_not_built_with_are_refused(tmp_path: Path) -> None:
    """Zeros at the end, as of a copy that was cut short, and parts of a store of many parts; older stores say nothing
    of their tokens."""
    store = built(tmp_path, lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), field="text")
    store.check_tokens()
    tokens = tmp_path / "store" / "tokens.bin"
    content = tokens.read_bytes()
    tokens.write_bytes(content[:-4] + bytes(4))
    with pytest.raises(ValueError, match="store has other tokens than it was built with; copy it again, or remove it"):
        TokenStore(tmp_path / "store").check_tokens()
    header = tmp_path / "store" / HEADER_FILE
    header.write_text(json.dumps(json.loads(header.read_text()) | {"tokens_sha256": ""}))
    TokenStore(tmp_path / "store").check_tokens()


def test_a_hash_of_parts_sees_a_hole_in_a_large_file(tmp_path: Path) -> None:
    whole, holed = tmp_path / "whole", tmp_path / "holed"
    content = bytes(range(1, 256)) * (1 << 16)  # 16 MiB, of which a quarter is read
    whole.write_bytes(content)
    holed.write_bytes(content[: 9 << 20] + bytes(1 << 20) + content[10 << 20 :])
    assert sha256_of_parts([whole]) == sha256_of_parts([whole])
    assert sha256_of_parts([whole]) != sha256_of_parts([holed])
    holed.write_bytes(content[:-1000] + bytes(1000))  # behind the last of the parts
    assert sha256_of_parts([whole]) == sha256_of_parts([holed])
    assert sha256_of_parts([whole], ends=True) != sha256_of_parts([holed], ends=True)


def test_damaged_boundaries_are_refused(tmp_path: Path) -> None:
    store = built(tmp_path, lines(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS]), field="text")
    np.array([0, 9, 4], "<i8").tofile(tmp_path / "store" / "documents.bin")
    with pytest.raises(ValueError, match=r"has a damaged documents\.bin; remove it"):
        _ = store.document_starts


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"text": "a"}, {"body": "b", "id": 1}], r"a\.jsonl:2 has no field 'text', its fields are body, id; give"),
        ([{"text": 7}], r"a\.jsonl:1 has a number in field 'text'; expected a text or a list of chat messages"),
        ([{"text": None}], r"a\.jsonl:1 has null in field 'text'; expected a text or a list of chat messages"),
        ([["text"]], r"a\.jsonl:1 is a list; expected an object with the field 'text'"),
        ([{"text": [{"from": "me"}]}], r"a\.jsonl:1 has messages without role or content in field 'text'"),
        ([{"text": []}], r"a\.jsonl:1 has an empty list in field 'text'"),
        ([{"text": ""}], r"a\.jsonl' holds no text in field 'text'; give a text of at least one byte"),
        ([{"text": "a"}, {"text": "\ud800"}], r"a\.jsonl:2 has half a character, '\\ud800', in field 'text'; write"),
        ([{"text": CHAT}], r"a\.jsonl:1: tokenizer bytes has no chat template; give --tokenizer"),
    ],
)
def test_a_record_that_is_no_document_is_refused_at_its_line(tmp_path: Path, records: list[Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        built(tmp_path, lines(tmp_path / "a.jsonl", records), field="text")
    assert not (tmp_path / "store").exists()


RECORD = b'{"text": "gr\xc3\xb6\xc3\x9fe"}\n'
FILES: dict[str, tuple[str, bytes, str]] = {
    "a broken line": ("a.jsonl", RECORD + b'{"text": \n', r"a\.jsonl:2 is no JSON .*; repair or remove that line"),
    "UTF-16 with its mark": (
        "a.jsonl",
        RECORD.decode().encode("utf-16"),
        "is not UTF-8 at byte 0; convert it to UTF-8",
    ),
    "UTF-16": (
        "a.jsonl",
        '{"text": "a"}'.encode("utf-16-le"),
        "is no JSON .*; convert the file to UTF-8, if it is UTF-16",
    ),
    "Latin-1": (
        "a.jsonl",
        RECORD.decode().encode("latin-1"),
        r"a\.jsonl:1 is not UTF-8 at byte 12; convert it to UTF-8",
    ),
    "lines that end with CR": (
        "a.jsonl",
        b'{"text": "a"}\r{"text": "b"}\r',
        "is no JSON .*; end lines with a line feed",
    ),
    "nothing": ("a.jsonl", b"", r"a\.jsonl' holds no text in field 'text'; give a text of at least one byte"),
    "blank lines": ("a.jsonl", b"\n\r\n", r"a\.jsonl' holds no text in field 'text'; give a text"),
    "nesting": ("a.jsonl", b"[" * 100_000, r"a\.jsonl:1 is no JSON \(maximum recursion depth"),
    "one object": ("a.json", b'{"text": "a"}', r"a\.json is one JSON value, an object; expected a list of records"),
    "half a list": ("a.json", b'[{"text": "a"},', r"a\.json is no JSON .*; repair it"),
    "a compressed file": (
        "a.jsonl",
        b"\x1f\x8b\x08" + RECORD,
        r"a\.jsonl:1 is not UTF-8 at byte 1; convert it to UTF-8",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_that_holds_no_records_is_refused(tmp_path: Path, kind: str) -> None:
    name, content, words = FILES[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=words):
        built(tmp_path, tmp_path / name, field="text")
    assert not (tmp_path / "store").exists()


@pytest.mark.parametrize(
    "content",
    [b"\xef\xbb\xbf" + RECORD, RECORD.replace(b"\n", b"\r\n"), RECORD[:-1], b"\n" + RECORD + b'{"text": ""}\n'],
)
def test_marks_line_ends_and_blanks_of_other_systems_are_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(content)
    assert texts_of(built(tmp_path, tmp_path / "a.jsonl", field="text")) == ["größe"]


def test_a_line_of_many_mebibytes_is_one_document(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "' + b"x" * (8 << 20) + b'"}\n')
    store = built(tmp_path, tmp_path / "a.jsonl", field="text")
    assert (store.header.documents, store.header.count) == (1, 8 << 20)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """Of single characters, so that tokens and characters are one thing, and a template beside it."""
    tokenizers = pytest.importorskip("tokenizers", reason="the tokenizers library is not installed")
    letters = sorted(set("<|>\n" + TEMPLATE + json.dumps(CHAT)))
    built = tokenizers.Tokenizer(tokenizers.models.WordLevel({letter: at for at, letter in enumerate(letters)}))
    built.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    built.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def chat_store(tmp_path: Path, tokenizer: Path, template: str, chat: Any = CHAT) -> tuple[TokenStore, FileTokenizer]:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template, "eos_token": "<|end|>"}))
    found = FileTokenizer(tokenizer)
    return built(
        tmp_path, lines(tmp_path / "chat.jsonl", [{"messages": chat}] * 2), field="messages", tokenizer=found
    ), found


@pytest.mark.parametrize(
    ("template", "answers"), [(TEMPLATE, ["4.<|end|>\n", "Yes, 4.<|end|>\n"]), (MARKED, ["4.", "Yes, 4."])]
)
def test_of_chats_the_answers_are_learnt(tmp_path: Path, tokenizer: Path, template: str, answers: list[str]) -> None:
    store, found = chat_store(tmp_path, tokenizer, template)
    assert (store.header.answers_only, store.header.documents) == (True, 2)
    places = np.arange(store.header.count)
    letters = {at: letter for letter, at in found._backend.get_vocab().items()}
    text = "".join(letters[int(token)] for token in store.at(places))
    assert text[: len(text) // 2].startswith("<|user|>2 + 2?")
    learnt = store.learnt(places)
    assert "".join(letter for letter, counts in zip(text, learnt, strict=True) if counts) == "".join(answers * 2)


@pytest.mark.parametrize(
    ("template", "chat", "words"),
    [
        (TEMPLATE, CHAT[:1], r"chat\.jsonl:1: the chat has no answer to learn"),
        (
            "{{ raise_exception('roles must alternate') }}",
            CHAT,
            "refuses it .roles must alternate.; repair the messages",
        ),
        ("{% for m in messages %}", CHAT, "is none that Jinja reads"),
        ("{{ 1 // 0 }}", CHAT, "the chat template refuses it .integer division or modulo by zero.; repair"),
        (TEMPLATE, [CHAT[0], {"role": "assistant", "content": None}], "content of message 2 is null, which the chat"),
        (
            TEMPLATE,
            [CHAT[0], {"role": "assistant", "content": [{"text": "4"}]}],
            "content of message 2 is a list, which",
        ),
        (MARKED, [{"role": "user", "content": "\ufdd0 x"}, CHAT[1]], "holds the character U.FDD0 or U.FDD1"),
        ("{{ messages | length }}", CHAT, "writes message 2 in another way once others follow"),
    ],
)
def test_a_chat_that_cannot_be_learnt_from_is_refused(tmp_path, tokenizer, template, chat, words) -> None:
    with pytest.raises(ValueError, match=words):
        chat_store(tmp_path, tokenizer, template, chat)


def test_parquet_and_datasets_folders_are_read_by_their_field(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    parquet, ipc = importlib.import_module("pyarrow.parquet"), importlib.import_module("pyarrow.ipc")
    table = pyarrow.table({"text": TEXTS, "id": [1, 2, 3]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    with ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as writer:
        writer.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    assert texts_of(built(tmp_path, tmp_path / "a.parquet", folder, field="text")) == TEXTS * 2
    with pytest.raises(ValueError, match="has no field 'body', its fields are text, id"):
        build_store([str(tmp_path / "a.parquet")], tmp_path / "other", ByteTokenizer(), field="body")
    parquet.write_table(pyarrow.table({"text": ["a", None]}), tmp_path / "null.parquet")
    with pytest.raises(ValueError, match=r"record 2 of .*null\.parquet has null in field 'text'; expected a text"):
        build_store([str(tmp_path / "null.parquet")], tmp_path / "other", ByteTokenizer(), field="text")
    (tmp_path / "half.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:200])
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "../other.txt"}]}))
    with pytest.raises(ValueError, match=r"'\.\./other\.txt' is no name of a file in it"):
        built(tmp_path, folder, field="text")
    (tmp_path / "zeros.parquet").write_bytes(b"PAR1" + bytes(100) + b"PAR1")
    with pytest.raises(ValueError, match=r"zeros\.parquet' cannot be read .*; give it whole"):
        built(tmp_path, tmp_path / "zeros.parquet", field="text")
    with pytest.raises(ValueError, match=r"half\.parquet' cannot be read .*; give it whole"):
        build_store([str(tmp_path / "half.parquet")], tmp_path / "other", ByteTokenizer(), field="text")
    with pytest.raises(ValueError, match="holds the splits train; give one of them, such as"):
        build_store([str(tmp_path / "saved")], tmp_path / "other", ByteTokenizer(), field="text")


def packed(store: TokenStore, **changes: Any) -> PackedSequences:
    shape = ModelShape(name="any", layers=1, hidden=8, ffn=8, heads=2, kv_heads=2, head_dim=4, vocab=512)
    settings = TrialSettings(task="train", method="burst", model=shape, mask="documents", **{"seq_len": 24, **changes})
    return PackedSequences(store, TokenSpan(start=0, stop=store.header.count), settings)


def test_rows_hold_whole_documents_and_labels_end_with_them(tmp_path: Path) -> None:
    texts = [*TEXTS, "x" * 50, "ab", "a" * 24, "z"]
    rows = packed(built(tmp_path, lines(tmp_path / "a.jsonl", [{"text": text} for text in texts]), field="text"))
    found = []
    for place in range(len(rows.packing)):
        row = joined([rows.row(place)], 28)
        assert (len(row.tokens_S), len(row.labels_S), sum(row.lengths)) == (28, 28, 28)
        assert row.positions_S.tolist() == [at for length in row.lengths for at in range(length)]
        parts = (each.split(row.lengths.tolist()) for each in (row.tokens_S, row.labels_S))
        found += [(bytes(tokens.tolist()), labels.tolist()) for tokens, labels in zip(*parts, strict=True)]
    documents = [(tokens, labels) for tokens, labels in found if any(tokens)]  # padding is zeros without a label
    assert all(set(labels) == {-100} for tokens, labels in found if not any(tokens))
    pieces = [text.encode() for text in (*TEXTS, "ab", "a" * 24, "xx")]  # one letter has nothing to predict
    expected = [(piece, [*piece[1:], -100]) for piece in pieces]
    expected += [(b"x" * 24, list(b"x" * 24))] * 2  # of a longer one, whose last token's label is in the next piece
    assert sorted(documents) == sorted(expected)


def test_rows_of_chats_have_labels_at_answers_alone(tmp_path: Path, tokenizer: Path) -> None:
    store, found = chat_store(tmp_path, tokenizer, TEMPLATE)
    letters = {at: letter for letter, at in found._backend.get_vocab().items()}
    row = packed(store, seq_len=200).row(0)
    assert "".join(letters[label] for label in row.labels_S.tolist() if label >= 0) == "4.<|end|>\nYes, 4.<|end|>\n" * 2

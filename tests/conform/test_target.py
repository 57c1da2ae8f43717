"""What a target file has to define, and that the table of cases asks what it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conform.cases import ATTENTION_CASES, CASES, WAYS, case_named, cases_of
from conform.target import CAPABILITIES, FUNCTIONS, CaseProblem, load, target_names

GOOD = """
NAME, VERSION, RANKS, CAPABILITIES = "mine", lambda: "1.0", (2, 4), ("causal", "documents")
def shard(whole, dim, problem): ...
def attention(q, k, v, problem): ...
def gather(part, dim, problem): ...
"""


def written(folder: Path, text: str) -> str:
    (folder / "mine.py").write_text(text)
    return str(folder / "mine.py")


def test_a_file_and_a_name_are_targets(tmp_path: Path) -> None:
    found = load(written(tmp_path, GOOD))
    assert (found.name, found.version, found.kind, found.ranks) == ("mine", "1.0", "attention", (2, 4))
    assert {load(name).kind for name in target_names()} == set(FUNCTIONS)
    missing = load(written(tmp_path, GOOD + "REQUIRES = ('json', 'no_such_module', 'no_such_package.core')"))
    assert missing.missing == ("no_such_module", "no_such_package.core")


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (GOOD + "DTYPE = 'fp8'", "has DTYPE 'fp8'; expected fp64, fp32 or bf16"),
        (GOOD.replace("def gather", "def other"), "has no function gather; a target of attention has shard"),
        (GOOD.replace("NAME", "NAMED"), "defines no NAME"),
        (
            GOOD.replace('"documents"', '"document"'),
            "claims 'document', which is no capability; did you mean documents",
        ),
        (GOOD.replace("(2, 4)", "()"), r"has RANKS \(\); give numbers of ranks"),
        (GOOD.replace("def attention", "def step"), "has no function make_model; a target of training has"),
        (GOOD.replace("(2, 4)", "2"), r"has RANKS 2; give a tuple, such as RANKS = \(2, 4\)"),
        (GOOD.replace('"causal", "documents"', '"causal"'), "has CAPABILITIES 'causal'; give a tuple"),
        (GOOD + "REQUIRES = 'torch'", "has REQUIRES 'torch'; give a tuple"),
        (GOOD + "DEVICES = ('gpu',)", r"has DEVICES \('gpu',\); choose from cpu, cuda"),
        (GOOD.replace('"documents"', '"bytes"'), "claims 'bytes' and has no function sent_bytes; define it, or do not"),
        ("import no_such_module", "cannot be imported: ModuleNotFoundError"),
        ("def shard(", r"cannot be imported: SyntaxError: '\(' was never closed \(mine.py, line 1\); correct the file"),
        ("import sys\nsys.exit(4)", "cannot be imported: SystemExit: 4; correct the file"),
    ],
)
def test_what_is_no_target_is_told_in_a_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=sentence):
        load(written(tmp_path, text))


def test_a_version_that_raises_is_told_in_a_sentence(tmp_path: Path) -> None:
    found = load(written(tmp_path, GOOD.replace('lambda: "1.0"', "lambda: 1 / 0")))
    with pytest.raises(ValueError, match="VERSION of mine raised ZeroDivisionError: division by zero; correct it"):
        _ = found.version


def test_a_variant_of_a_file_without_variants_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine.py has no VARIANTS, so no 'fast'; leave out what follows the colon"):
        load(written(tmp_path, GOOD) + ":fast")
    with pytest.raises(ValueError, match=r"^variant 'rings' is unknown; choose one of ring"):
        load("native:rings")


def test_an_unknown_name_has_a_neighbour() -> None:
    with pytest.raises(ValueError, match="did you mean burst_attention"):
        load("burst_atention")
    with pytest.raises(ValueError, match="did you mean documents-odd"):
        case_named("document-odd")
    with pytest.raises(ValueError, match="documents of 3 tokens in a sequence of 48"):
        CaseProblem(documents=(1, 2))


def test_the_table_has_thirty_cases_of_each_kind_at_least_with_sources_names_and_claimable_needs() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 110
    assert {kind: len(cases_of(kind)) >= 30 for kind in FUNCTIONS} == dict.fromkeys(FUNCTIONS, True)
    for case in CASES:
        assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+|fault: .+", case.source), case.name
        assert case.way in WAYS
        for ranks in (1, 2, 3, 8):
            assert case.needs(ranks) <= set(CAPABILITIES), case.name
    asked = set().union(*(case.needs(8) for case in CASES))
    assert asked == set(CAPABILITIES)  # nothing can be claimed that no case asks
    assert sum(not case.source.startswith("fault") for case in CASES) >= 30
    assert 5 <= sum(case.quick for case in ATTENTION_CASES) <= 8

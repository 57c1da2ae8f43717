"""Forms of RoPE have the frequencies of transformers, survive texts and configurations, and are else refused."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from engine.rope import parse_rope, read_rope, rope_frequencies, rotary_tables, write_rope
from tests.engine.models.float64 import in_float64

HEAD_DIM = 16
SHORT = [1.0 + 0.1 * index for index in range(8)]
LONG = [2.0 + 0.3 * index for index in range(8)]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 32.0}
LONGROPE = {"rope_type": "longrope", "short_factor": SHORT, "long_factor": LONG}
ORIGINAL = {"original_max_position_embeddings": 256}

FORMS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": LLAMA3 | ORIGINAL,
    "yarn": YARN | ORIGINAL,
    "yarn of gpt-oss": YARN | ORIGINAL | {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn with other ends": YARN | ORIGINAL | {"beta_fast": 9.5, "beta_slow": 2.5, "attention_factor": 1.25},
    "yarn of DeepSeek": YARN | ORIGINAL | {"mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn of a short context": YARN | {"original_max_position_embeddings": 4},
    "longrope": LONGROPE | ORIGINAL,
    "longrope with a factor": LONGROPE | ORIGINAL | {"factor": 16.0},
    "longrope with an attention factor": LONGROPE | ORIGINAL | {"attention_factor": 1.5},
    "half of each head": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
}


def config_of(form: dict[str, Any]) -> dict[str, Any]:
    return {"max_position_embeddings": 1024, "rope_theta": 50_000.0, "rope_scaling": form}


@pytest.mark.parametrize("seq_len", [100, 1024, 5000])
@pytest.mark.parametrize("name", FORMS)
def test_frequencies_are_those_of_transformers(name: str, seq_len: int) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    given = config_of(dict(FORMS[name]))
    base, text = read_rope(given)
    found = rope_frequencies(parse_rope(text), base, HEAD_DIM, seq_len)
    config = transformers.LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=HEAD_DIM, **given)
    form = FORMS[name]["rope_type"]
    reference = ROPE_INIT_FUNCTIONS.get(
        form, lambda config, **_: LlamaRotaryEmbedding.compute_default_rope_parameters(config)
    )
    with in_float64():
        inverse_D, attention_factor = reference(config, device=torch.device("cpu"), seq_len=seq_len)
    assert inverse_D.dtype == torch.float64
    torch.testing.assert_close(torch.tensor(found.inverse_D, dtype=torch.float64), inverse_D, rtol=1e-14, atol=0)
    assert found.attention_factor == pytest.approx(attention_factor, rel=1e-15)


@pytest.mark.parametrize(("name", "longer"), [(name, "dynamic" in name or "longrope" in name) for name in FORMS])
def test_tables_change_with_the_length_of_the_sequence_in_two_forms_alone(name: str, longer: bool) -> None:
    base, text = read_rope(config_of(FORMS[name]))
    short, long = (
        rotary_tables(torch.arange(9), HEAD_DIM, base, torch.float64, text, length)[0] for length in (9, 5000)
    )
    assert torch.equal(short, long) is not longer


def test_tables_are_cosine_and_sine_times_the_attention_factor() -> None:
    base, text = read_rope(config_of(FORMS["yarn"]))
    inverse_D, factor = rope_frequencies(parse_rope(text), base, HEAD_DIM, 0)
    assert factor > 1.3
    cos_LD, sin_LD = rotary_tables(torch.tensor([0, 1_048_575]), HEAD_DIM, base, torch.float32, text)
    assert cos_LD.dtype == sin_LD.dtype == torch.float32
    angles_D = 1_048_575 * torch.tensor(inverse_D, dtype=torch.float64)
    torch.testing.assert_close(cos_LD[1], (factor * angles_D.cos()).float())
    torch.testing.assert_close(sin_LD[1], (factor * angles_D.sin()).float())


@pytest.mark.parametrize("name", FORMS)
def test_a_form_survives_its_text_and_its_configuration(name: str) -> None:
    base, text = read_rope(config_of(FORMS[name]))
    assert str(parse_rope(text)) == text
    written = json.loads(json.dumps({"max_position_embeddings": 7} | write_rope(base, text)))
    assert read_rope(written) == (base, text)


@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith(("yarn", "longrope"))])
def test_release_4_takes_the_same_factor_from_what_is_written(name: str) -> None:
    base, text = read_rope(config_of(FORMS[name]))
    written = write_rope(base, text)
    original = written["rope_scaling"]["original_max_position_embeddings"]
    assert written["max_position_embeddings"] / original == parse_rope(text).factor


def test_texts_are_short_where_they_can_be() -> None:
    assert read_rope(config_of(FORMS["default"])) == (50_000.0, "none")
    assert read_rope({}) == (10_000.0, "none")
    assert read_rope({}, base=150_000.0) == (150_000.0, "none")
    llama3 = "llama3:factor=8,original=256,low_freq_factor=1,high_freq_factor=4"
    assert read_rope(config_of(FORMS["llama3"]))[1] == llama3
    assert str(parse_rope("llama3:original=256,high_freq_factor=4.0,factor=8,low_freq_factor=1")) == llama3


NESTED = {"full_attention": LLAMA3 | ORIGINAL | {"rope_theta": 1e6}, "sliding_attention": {"rope_type": "default"}}


@pytest.mark.parametrize(
    ("config", "layer_type", "expected"),
    [
        ({"rope_parameters": NESTED}, "full_attention", (1e6, read_rope({"rope_scaling": LLAMA3 | ORIGINAL})[1])),
        ({"rope_parameters": NESTED}, "sliding_attention", (1e4, "none")),
        ({"rope_parameters": {"full_attention": {"rope_theta": 5e5}}}, None, (5e5, "none")),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_theta": 500_000}}, None, (5e5, "none")),
        ({"rope_theta": 5e5, "rope_scaling": None}, "full_attention", (5e5, "none")),
        ({"rope_scaling": {"type": "linear", "factor": 2, "rope_type": "linear"}}, None, (1e4, "linear:factor=2")),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, None, (1e4, "linear:factor=2")),
        (
            {"rope_scaling": YARN | {"attention_factor": None}, "max_position_embeddings": 64},
            None,
            (1e4, "yarn:factor=32,original=64"),
        ),
        (
            {"rope_scaling": LONGROPE, "original_max_position_embeddings": 64, "max_position_embeddings": 128},
            None,
            (1e4, read_rope({"rope_scaling": LONGROPE | {"original_max_position_embeddings": 64, "factor": 2}})[1]),
        ),
    ],
)
def test_a_configuration_of_either_release_is_read(
    config: dict[str, Any], layer_type: str | None, expected: tuple[float, str]
) -> None:
    assert read_rope(config, layer_type) == expected


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"rope_type": "proportional"}}, "rope_type is 'proportional', .*; expected default, linear"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type is \['yarn'\]"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; expected a dictionary"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing, which rope_type linear needs"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, "original_max_position_embeddings is missing"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "beta_fast": 3}},
            "beta_fast is 3, which rope_type linear does not have; expected only factor",
        ),
        (
            {"rope_scaling": {"mrope_section": [2, 3]}},
            r"mrope_section is \[2, 3\], which rope_type default does not have",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor is '2'; expected a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": True}}, "factor is true; expected a number"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -2}}, "factor is -2; give a number above 0"),
        (
            {"rope_scaling": {"rope_type": "yarn"}, "max_position_embeddings": 0},
            "is missing, which rope_type yarn needs",
        ),
        ({"rope_scaling": YARN | ORIGINAL | {"truncate": 1}}, "truncate is 1; expected true or false"),
        (
            {"rope_scaling": YARN | {"original_max_position_embeddings": 9.5}},
            "embeddings is 9.5; expected a whole number",
        ),
        ({"rope_scaling": YARN | ORIGINAL | {"beta_fast": 0.5}}, "beta_fast is 0.5, not above beta_slow, 1"),
        ({"rope_scaling": LLAMA3 | ORIGINAL | {"low_freq_factor": 4}}, "high_freq_factor is 4, not above low_freq_fa"),
        ({"rope_scaling": LONGROPE | ORIGINAL | {"long_factor": 2}}, "long_factor is 2; expected a list"),
        ({"rope_theta": "1e4"}, "rope_theta is '1e4'; expected a number"),
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e5}}, r"rope_theta is given as \[10000.0, 500000.0\]"),
        (
            {"rope_parameters": NESTED},
            "has dictionaries for full_attention, sliding_attention; expected one for all layers",
        ),
        ({"rope_parameters": NESTED | {"rope_theta": 3}}, "expected one dictionary, or one per type of layer"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor is 1.5; give a part above 0, at most 1"),
        (
            {"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"type": "linear", "factor": 4}},
            "rope_scaling and rope_parameters differ",
        ),
    ],
)
def test_what_a_configuration_has_wrong_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_rope(config)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ntk", "rope_type is 'ntk'; expected default, linear"),
        ("linear", "factor is missing"),
        ("linear:factor=2,factor=3", "rope_scaling has 'factor=3'; expected none, or TYPE:NAME=NUMBER"),
        ("linear:scale=2", "rope_scaling has 'scale=2'; expected none, .* factor, original"),
        ("linear:factor=two", "factor is 'two'; expected a number"),
        ("yarn:factor=2,original=1", "embeddings is 1; give a number above 1"),
        ("linear:factor=nan", "factor is nan; expected a finite number"),
        ("yarn:factor=2,original=8,truncate=no", "truncate is 'no'; expected true or false"),
        ("yarn:factor=2,original=8.5", "embeddings is 8.5; expected a whole number"),
        ("longrope:short_factor=1/,long_factor=2,original=4", "short_factor is ''; expected a number"),
        ("linear:factor=2,beta_fast=3", "beta_fast is 3.0, which rope_type linear does not use; leave it out"),
    ],
)
def test_what_a_text_has_wrong_is_named(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_rope(text)


@pytest.mark.parametrize(
    ("text", "head_dim", "message"),
    [
        ("none", 7, "head_dim 7 is 7; RoPE needs an even number"),
        ("default:partial_rotary_factor=0.25", 12, "head_dim 12 times partial_rotary_factor 0.25 is 3; RoPE needs"),
        ("dynamic:factor=2,original=8", 2, "rope_type dynamic needs more than 2"),
        ("longrope:short_factor=1/2,long_factor=1,original=8", 4, "long_factor has 1 numbers, but 4 .* need 2"),
    ],
)
def test_a_head_that_cannot_be_rotated_so_is_refused(text: str, head_dim: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        rope_frequencies(parse_rope(text), 1e4, head_dim, 8)


def test_a_form_is_read_without_torch() -> None:
    code = "import sys; from engine.rope import read_rope; read_rope({}); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

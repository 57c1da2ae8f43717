"""Names that settings had earlier are read as those of today, in files and in calls."""

from __future__ import annotations

import warnings

import pytest

from engine.old_names import (
    KEYWORDS,
    RESOLVED_VALUES,
    SETTINGS,
    VALUES,
    current_resolved,
    current_settings,
    first_settings,
    renamed_keywords,
)
from engine.settings import TrialSettings
from harness.spec.schema import leaf_types

OLD = {"gradient_wire": "input", "schedule": "heads_inside", "seq_len": 4096}
CURRENT = {"grad_comm_dtype": "input", "schedule": "usp", "seq_len": 4096}


def test_old_settings_are_read_as_those_of_today_and_hashed_under_their_first_names() -> None:
    assert current_settings(OLD) == CURRENT
    assert current_settings(CURRENT) == CURRENT
    assert first_settings(CURRENT) == OLD


def test_every_new_name_is_one_that_exists_and_no_old_one_does() -> None:
    existing = leaf_types(TrialSettings)
    assert set(SETTINGS.values()) | set(VALUES) <= existing.keys()
    assert not SETTINGS.keys() & existing.keys()
    for key, names in VALUES.items():
        assert set(names.values()) <= set(existing[key].__args__)
        assert not names.keys() & set(existing[key].__args__)
        assert len(set(names.values())) == len(names), "a first name can be found for every value"


def test_a_setting_under_both_names_keeps_both_to_be_refused_by_its_reader() -> None:
    both = {"gradient_wire": "input", "grad_comm_dtype": "fp32"}
    assert current_settings(both) == both


def test_what_auto_became_is_read_with_the_schedules_of_its_estimate() -> None:
    recorded = {
        "schedule": "head_exchange",
        "head_parts": "2",
        "exchange": "all_to_all",
        "estimate": "head_exchange 198 ms, heads_across 203 ms, ring 211 ms",
    }
    assert current_resolved(recorded) == {
        "schedule": "ulysses",
        "num_head_chunks": "2",
        "exchange": "all_to_all",
        "estimate": "ulysses 198 ms, usp_transposed 203 ms, ring 211 ms",
    }
    assert current_resolved({"schedule": "all_to_all"}) == {"schedule": RESOLVED_VALUES["schedule"]["all_to_all"]}


@renamed_keywords
def toy(q: int, *, schedule: str = "auto", grad_comm_dtype: str = "fp32", saved: object = None) -> tuple[object, ...]:
    """A toy."""
    return q, schedule, grad_comm_dtype, saved


def test_a_call_by_old_keywords_and_values_warns_and_names_the_new_ones() -> None:
    with pytest.warns(DeprecationWarning, match="is now") as warned:
        found = toy(1, schedule="head_exchange", gradient_wire="input", stored="kept")  # type: ignore[call-arg]
    assert found == (1, "ulysses", "input", "kept")
    said = sorted(str(one.message) for one in warned)
    assert said == [
        "gradient_wire is now grad_comm_dtype; write grad_comm_dtype=",
        "schedule head_exchange is now ulysses; write schedule='ulysses'",
        "stored is now saved; write saved=",
    ]
    assert {one.filename for one in warned} == {__file__}, "a warning points to the line that made the call"


def test_a_call_by_the_names_of_today_does_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert toy(1, schedule="ulysses", saved=None) == (1, "ulysses", "fp32", None)
    assert (toy.__name__, toy.__doc__) == ("toy", "A toy.")


def test_a_keyword_under_both_names_is_refused() -> None:
    assert KEYWORDS["stored"] == "saved"
    with pytest.raises(TypeError, match="toy was given stored and saved, which is its name now; give saved"):
        toy(1, stored=1, saved=2)  # type: ignore[call-arg]

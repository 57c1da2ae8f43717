"""Where state and caches lie: the XDG variables are honoured, relative ones are ignored as the specification asks."""

from pathlib import Path

import pytest

from cluster.files.filesystem import cache_folder, state_folder


@pytest.mark.parametrize(
    ("folder", "variable", "usual"),
    [(state_folder, "XDG_STATE_HOME", ".local/state/burst/x"), (cache_folder, "XDG_CACHE_HOME", ".cache/burst/x")],
)
def test_a_folder_follows_its_variable_when_that_is_absolute(monkeypatch, tmp_path, folder, variable, usual):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(variable, "/elsewhere")
    assert folder("x") == Path("/elsewhere/burst/x")
    for ignored in ("", "relative/path"):
        monkeypatch.setenv(variable, ignored)
        assert folder("x") == tmp_path / usual
    monkeypatch.delenv(variable)
    assert folder("x") == tmp_path / usual

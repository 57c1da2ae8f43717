"""Taking over an env.sh: what is kept, changed and dropped, and that nothing of it is ever executed."""

import pytest

from cluster.environment.importing import import_env
from cluster.environment.rules import concern
from cluster.environment.shell_file import Assignment, read_assignments
from cluster.files.errors import UsageError
from cluster.inventory.site import load_site

# The kinds of lines such files hold, the published artifact's env.sh among them.
FILE = """\
#!/bin/bash
# don't touch
export NCCL_IB_HCA=mlx5_2,mlx5_3   # compute
export NCCL_SOCKET_IFNAME=eth0
export GLOO_SOCKET_IFNAME=^docker0,lo
export CUDA_DEVICE_MAX_CONNECTIONS=1
export UCX_NET_DEVICES=mlx5_2:1
export NCCL_DEBUG='WARN'; export NCCL_IB_TIMEOUT="22"
NCCL_ASYNC_ERROR_HANDLING=0
export NCCL_IB_GID_INDEX=3
export HF_TOKEN=hf_abc
export HTTP_PROXY=http://me:secret@proxy:3128
export LD_LIBRARY_PATH=/opt/lib
export OMP_NUM_THREADS=8
export DATA_FOLDER=$HOME/data
export MASTER_ADDR=10.0.0.1 NOTE="two
lines: yes"
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export RAY_USAGE_STATS_ENABLED=1
ulimit -l unlimited
touch HACKED && rm -rf important
"""


def fates(text):
    return {finding.name or finding.shown: finding.fate for finding in import_env(text, "env.sh").findings}


def only(text):
    (finding,) = import_env(text, "env.sh").findings
    return finding


def test_a_whole_file_is_judged_line_by_line():
    assert fates(FILE) == {
        "NCCL_IB_HCA": "change",
        "NCCL_SOCKET_IFNAME": "change",
        "GLOO_SOCKET_IFNAME": "drop",
        "CUDA_DEVICE_MAX_CONNECTIONS": "drop",
        "UCX_NET_DEVICES": "drop",
        "NCCL_DEBUG": "keep",
        "NCCL_IB_TIMEOUT": "keep",
        "NCCL_ASYNC_ERROR_HANDLING": "change",
        "NCCL_IB_GID_INDEX": "drop",
        "HF_TOKEN": "drop",
        "HTTP_PROXY": "drop",
        "LD_LIBRARY_PATH": "drop",
        "OMP_NUM_THREADS": "drop",
        "DATA_FOLDER": "drop",
        "MASTER_ADDR": "drop",
        "NOTE": "keep",
        "PYTORCH_CUDA_ALLOC_CONF": "drop",
        "RAY_USAGE_STATS_ENABLED": "drop",
        "ulimit -l unlimited": "drop",
        "touch HACKED && rm -rf important": "drop",
    }


def test_the_fragment_is_a_site_file(tmp_path):
    fragment = import_env(FILE, "env.sh").site_fragment()
    assert (
        fragment
        == """\
# Imported by `burst env --import` from env.sh; see docs/cluster.md.
network:
  hcas: ["mlx5_2", "mlx5_3"]  # NCCL_IB_HCA, line 3
  interface: "eth0"  # NCCL_SOCKET_IFNAME, line 4
environment:
  NCCL_DEBUG: "WARN"  # line 8
  NCCL_IB_TIMEOUT: "22"  # line 8
  TORCH_NCCL_ASYNC_ERROR_HANDLING: "0"  # line 9
  NOTE: "two\\nlines: yes"  # line 16
"""
    )
    (tmp_path / "site.yaml").write_text(fragment)
    site = load_site(tmp_path / "site.yaml")
    assert site.network.hcas == ("mlx5_2", "mlx5_3")
    assert site.network.interface == "eth0"
    assert site.environment["NOTE"] == "two\nlines: yes"


def test_a_file_of_nothing_but_comments_is_an_empty_site(tmp_path):
    found = import_env("# nothing\n", "env.sh")
    assert found.findings == ()
    (tmp_path / "site.yaml").write_text(found.site_fragment())
    assert load_site(tmp_path / "site.yaml").environment == {}


def test_nothing_secret_is_shown():
    text = repr(import_env(FILE, "env.sh")) + import_env(FILE, "env.sh").site_fragment()
    assert "hf_abc" not in text
    assert "me:secret" not in text


def test_what_a_condition_decides_is_left_to_people():
    text = "if test -d /x; then\n  export A=1\nelse\n  export A=2\nfi\nf() {\nexport B=1\n}\nexport C=1\n"
    found = [finding for finding in import_env(text, "env.sh").findings if finding.name]
    assert [(finding.name, finding.line, finding.fate) for finding in found] == [
        ("A", 2, "drop"), ("A", 4, "drop"), ("B", 7, "drop"), ("C", 9, "keep"),
    ]  # fmt: skip
    nested = "if a; then if b; then\nexport A=1\nfi\nexport B=1\nfi\nfor i in 1 2; do\nexport D=1\ndone\nexport C=1\n"
    kept = [finding.name for finding in import_env(nested, "env.sh").findings if finding.fate == "keep"]
    assert kept == ["C"]


@pytest.mark.parametrize(
    ("value", "fate", "hcas"),
    [
        ("=mlx5_2:1,mlx5_10:1", "keep", ("mlx5_2:1", "mlx5_10:1")),
        ("mlx5_1", "change", ("mlx5_1",)),
        ("mlx5", "drop", ""),
        ("bnxt_re", "drop", ""),
        ("^mlx5_bond", "drop", ""),
        ("^=mlx5_0", "drop", ""),
        ("", "drop", ""),
        ("'a b'", "drop", ""),
    ],
)
def test_adapters_are_taken_by_exact_names(value, fate, hcas):
    finding = only(f"export NCCL_IB_HCA={value}")
    assert (finding.fate, finding.value) == (fate, hcas)


@pytest.mark.parametrize(
    ("line", "fate", "interface"),
    [
        ("NCCL_SOCKET_IFNAME==ens1f0", "keep", "ens1f0"),
        ("NCCL_SOCKET_IFNAME=eth0", "change", "eth0"),
        ("GLOO_SOCKET_IFNAME=eth0", "keep", "eth0"),
        ("NCCL_SOCKET_IFNAME=eth", "drop", ""),
        ("NCCL_SOCKET_IFNAME==eth0,eth1", "drop", ""),
        ("NCCL_SOCKET_IFNAME=^docker0", "drop", ""),
        ("GLOO_SOCKET_IFNAME=^docker0", "drop", ""),
    ],
)
def test_interfaces_are_taken_by_exact_names(line, fate, interface):
    finding = only(f"export {line}")
    assert (finding.fate, finding.value) == (fate, interface)


def test_one_interface_for_both_the_first_wins():
    found = import_env("export NCCL_SOCKET_IFNAME==eth0\nGLOO_SOCKET_IFNAME=eth1\n", "env.sh").findings
    assert [finding.fate for finding in found] == ["keep", "drop"]
    assert found[1].reason == "NCCL_SOCKET_IFNAME on line 1 has another value and comes first"
    same = import_env("export NCCL_SOCKET_IFNAME==eth0\nGLOO_SOCKET_IFNAME=eth0\n", "env.sh").findings
    assert same[1].reason == "NCCL_SOCKET_IFNAME on line 1 has the same value"


def test_of_two_assignments_the_last_counts_as_in_a_shell():
    found = import_env("export NCCL_DEBUG=INFO\nexport NCCL_DEBUG=WARN\n", "env.sh")
    assert [(finding.fate, finding.value) for finding in found.findings] == [("drop", ""), ("keep", "WARN")]
    assert found.findings[0].reason == "is set again on line 2"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("export A=1", [("A", "1", False)]),
        ("  A=1 B='2 3'", [("A", "1", False), ("B", "2 3", False)]),
        ("declare -x A=1", [("A", "1", False)]),
        ("export A=1 # B=2", [("A", "1", False)]),
        ("export A=1#2", [("A", "1#2", False)]),
        ("export A='#'\"'\"x", [("A", "#'x", False)]),
        ("export A=a\\ b\\$c", [("A", "a b$c", False)]),
        ("export A='$HOME `x`'", [("A", "$HOME `x`", False)]),
        ('export A="x\\$y"', [("A", "x$y", False)]),
        ('export A="$HOME"', [("A", "$HOME", True)]),
        ("export A=`hostname`", [("A", "`hostname`", True)]),
        ("export A=~/x", [("A", "~/x", True)]),
        ("export A=1,\\\n2", [("A", "1,2", False)]),
        ("export A=", [("A", "", False)]),
        ("export A", []),
        ("A=1 program", [("", "A=1 program", False)]),
        ("if true; then export A=1; fi", [("", "if true", False), ("", "then export A=1", False), ("", "fi", False)]),
        ("# it's a comment\nexport A=1", [("A", "1", False)]),
        ("export A=1\r", [("A", "1", False)]),
    ],
)
def test_assignments_are_read_as_a_shell_quotes_them(text, expected):
    found = read_assignments(text, "env.sh")
    assert [(each.name, each.value, each.is_expanded) for each in found] == expected


def test_lines_are_counted_through_quotes_continuations_and_comments():
    text = "# one\nA=1\n\nB='x\ny'\nC=1,\\\n2\n  # eight\nD=4; E=5\n"
    assert [(each.name, each.line) for each in read_assignments(text, "f")] == [
        ("A", 2), ("B", 4), ("C", 6), ("D", 9), ("E", 9),
    ]  # fmt: skip


def test_a_quote_that_never_closes_is_found_at_its_statement():
    with pytest.raises(UsageError, match=r"env\.sh:2: a quote is opened and never closed"):
        read_assignments("A=1\nexport B='x\nC=2\n", "env.sh")


def test_the_concerns_of_a_sites_own_variables_name_the_variable():
    assert concern("NCCL_IB_HCA", "mlx5_1").startswith("NCCL_IB_HCA=mlx5_1 names prefixes")
    assert concern("NCCL_IB_HCA", "=mlx5_1") == ""
    assert concern("GLOO_SOCKET_IFNAME", "eth0") == ""
    assert concern("NCCL_DEBUG", "INFO") == ""


def test_an_assignment_is_a_plain_value():
    assert read_assignments("A=1", "f") == [Assignment(line=1, name="A", value="1")]

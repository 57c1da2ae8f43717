"""The environment of whole machines, as the whole text of env.sh."""

import re
import subprocess
from pathlib import Path

import pytest

from cluster.discovery.facts import NodeFacts
from cluster.discovery.hcas import HcaChoice, InterfaceChoice
from cluster.environment.ranks import adapter_values, connections, socket_values, trial_values
from cluster.environment.rendering import NodeEnvironment, env_sh, render_node
from cluster.environment.value import Variable, is_secret, overlaid, redact, shown
from cluster.inventory.site import NetworkExpectation, Site, Storage
from tests.cluster.fake_node import FakeNode, a800, h100, roce

H100 = """\
# Environment of gpu01, rendered by `burst cluster env`. To be sourced; it sets variables and does nothing else.

# discovered: carries the route to the head 10.0.0.1, as 10.0.0.11
export NCCL_SOCKET_IFNAME='=bond0'

# discovered: carries the route to the head 10.0.0.1, as 10.0.0.11
export GLOO_SOCKET_IFNAME=bond0

# discovered: 8 of the 11 ports: those near GPUs
export NCCL_IB_HCA='=mlx5_0:1,mlx5_3:1,mlx5_4:1,mlx5_5:1,mlx5_6:1,mlx5_9:1,mlx5_10:1,mlx5_11:1'

# default: 128 cores shared by 8 ranks, at most 8: beside a GPU a few threads suffice
export OMP_NUM_THREADS=8

# default: NumPy's pool computes nothing here, and its threads could not be forked
export OPENBLAS_NUM_THREADS=1

# default: long sequences fragment segments of a fixed size
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# method: with fewer queues than streams, one that waits for a peer can hold up one that feeds it
export CUDA_DEVICE_MAX_CONNECTIONS=32

# default: a lost peer ends the rank instead of hanging it
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1

# default: a collective that times out leaves the flight recorder's file
export TORCH_NCCL_DUMP_ON_TIMEOUT=1

# default: how many collectives the flight recorder remembers; 0 turns it off
export TORCH_FR_BUFFER_SIZE=2000

# default: Ray reports its use to its makers by default
export RAY_USAGE_STATS_ENABLED=0
"""


@pytest.fixture
def node(tmp_path, monkeypatch):
    node = FakeNode(tmp_path, monkeypatch)
    node.program("nproc", "echo 128")
    return node


def test_h100_with_storage_adapters(node):
    h100(node)
    assert env_sh(render_node(node.facts(), Site())) == H100


def test_a800_of_the_published_artifact(node):
    a800(node)
    site = Site(environment={"NCCL_DEBUG": "WARN"}, ranks_per_node=4)
    rendered = render_node(node.facts(site), site, method="megatron_cp_upstream")
    assert (
        env_sh(rendered)
        == """\
# Environment of gpu01, rendered by `burst cluster env`. To be sourced; it sets variables and does nothing else.

# discovered: holds the head's own address 10.0.0.1
export NCCL_SOCKET_IFNAME='=ens1'

# discovered: holds the head's own address 10.0.0.1
export GLOO_SOCKET_IFNAME=ens1

# discovered: 4 of the 7 ports: those near GPUs
export NCCL_IB_HCA='=mlx5_2:1,mlx5_3:1,mlx5_5:1,mlx5_6:1'

# default: 128 cores shared by 4 ranks, at most 8: beside a GPU a few threads suffice
export OMP_NUM_THREADS=8

# default: NumPy's pool computes nothing here, and its threads could not be forked
export OPENBLAS_NUM_THREADS=1

# default: long sequences fragment segments of a fixed size
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

# method: Megatron-LM starts its communication before computation by sharing one queue
export CUDA_DEVICE_MAX_CONNECTIONS=1

# default: a lost peer ends the rank instead of hanging it
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1

# default: a collective that times out leaves the flight recorder's file
export TORCH_NCCL_DUMP_ON_TIMEOUT=1

# default: how many collectives the flight recorder remembers; 0 turns it off
export TORCH_FR_BUFFER_SIZE=2000

# default: Ray reports its use to its makers by default
export RAY_USAGE_STATS_ENABLED=0

# site: set by the site file
export NCCL_DEBUG=WARN
"""
    )


def test_roce_leaves_the_gid_index_to_nccl_unless_the_site_names_one(node):
    roce(node)
    variables = render_node(node.facts(), Site()).variables
    assert variables["NCCL_IB_HCA"] == "=rocep0s0:1,rocep1s0:1"
    assert "NCCL_IB_GID_INDEX" not in variables
    named = Site(network=NetworkExpectation(gid_index=3))
    assert render_node(node.facts(), named).variables["NCCL_IB_GID_INDEX"] == "3"


def test_a_gpu_node_without_adapters_says_so_to_nccl_and_leaves_plugins_alone(node):
    node.gpu("pci0000:10/0000:10:01.0/0000:11:00.0")
    rendered = render_node(node.facts(head=None), Site())
    assert rendered.variables["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_NET" not in rendered.variables
    assert "NCCL_IB_HCA" not in rendered.variables
    assert "NCCL_SOCKET_IFNAME" not in rendered.variables
    assert rendered.variables["GLOO_SOCKET_IFNAME"] == "lo"


def test_a_name_that_begins_another_is_never_matched_with_it(node):
    switch = "pci0000:10/0000:10:01.0/0000:20:00.0"
    node.gpu(f"{switch}/0000:20:01.0/0000:40:00.0")
    node.hca("mlx5_1", f"{switch}/0000:20:02.0/0000:50:00.0")
    node.hca("mlx5_10", "pci0000:60/0000:60:01.0/0000:61:00.0")
    assert render_node(node.facts(), Site()).variables["NCCL_IB_HCA"] == "=mlx5_1:1"


def test_the_sites_choices_win_and_say_what_they_replace(node):
    h100(node)
    site = Site(
        network=NetworkExpectation(interface="eth0", hcas=("mlx5_0", "mlx5_3:1")),
        environment={"OMP_NUM_THREADS": "3", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    )
    rendered = render_node(node.facts(site), site)
    values = {value.name: value for value in rendered.values}
    assert values["NCCL_SOCKET_IFNAME"].value == "=eth0"
    assert values["GLOO_SOCKET_IFNAME"].value == "eth0"
    assert (values["NCCL_IB_HCA"].value, values["NCCL_IB_HCA"].origin) == ("=mlx5_0,mlx5_3:1", "site")
    assert values["OMP_NUM_THREADS"].reason == (
        "set by the site file, instead of 8 "
        "(128 cores shared by 8 ranks, at most 8: beside a GPU a few threads suffice)"
    )
    assert any("CUDA_DEVICE_MAX_CONNECTIONS=1 belongs to a method" in warning for warning in rendered.warnings)


def test_ray_reports_nothing_even_if_the_site_says_so():
    rendered = render_node(NodeFacts(node="n"), Site(environment={"RAY_USAGE_STATS_ENABLED": "1"}))
    assert rendered.variables["RAY_USAGE_STATS_ENABLED"] == "0"
    assert any("RAY_USAGE_STATS_ENABLED" in warning for warning in rendered.warnings)


HOSTILE = [
    "two words",
    "$(touch HACKED)",
    "`touch HACKED`",
    "it's; touch HACKED #",
    'a"b\\c$HOME',
    "line\ntouch HACKED\n",
    "'\ntouch HACKED\n'",
    "",
    "ünï",
]


def test_no_value_breaks_out_of_its_quotes(tmp_path):
    names = [f"NCCL_X{number}" for number in range(len(HOSTILE))]
    site = Site(environment=dict(zip(names, HOSTILE, strict=True)))
    (tmp_path / "env.sh").write_text(env_sh(render_node(NodeFacts(node="x\ntouch HACKED"), site)))
    show = "; ".join(f'printf "%s\\0" "${name}"' for name in names)
    done = subprocess.run(
        ["sh", "-euc", f". ./env.sh; {show}"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\0")[:-1] == HOSTILE
    assert [path.name for path in tmp_path.iterdir()] == ["env.sh"]


def test_no_reason_breaks_out_of_its_comment():
    own = overlaid([Variable(name="A", value="x\ntouch HACKED", reason="r")], {"A": "1"}, by="theirs", origin="site")
    text = env_sh(NodeEnvironment(values=own, network=render_node(NodeFacts(node="n"), Site()).network, warnings=()))
    assert text.splitlines()[2:] == ["# site: theirs, instead of x?touch HACKED (r)", "export A=1"]


@pytest.mark.parametrize(
    ("method", "capability", "queues"),
    [
        ("burst", 9.0, "32"),
        ("megatron_cp", 8.0, "32"),  # native: the engine's own trainer
        ("megatron_cp_upstream", 8.0, "1"),
        ("megatron_cp_upstream", 9.0, "1"),
        ("megatron_cp_upstream", None, "1"),
        ("megatron_cp_upstream", 10.0, "32"),
        ("internevo_upstream", 9.0, None),
    ],
)
def test_queues_follow_method_and_gpu(method, capability, queues):
    value = connections(method, capability)
    assert (value.value if value else None) == queues


def test_no_interface_renders_none_rather_than_a_guess():
    assert list(socket_values(InterfaceChoice(name="", reason=""))) == []


def test_a_site_without_adapters_turns_them_off():
    (value,) = adapter_values(HcaChoice(ports=(), origin="site"))
    assert (value.name, value.value, value.origin) == ("NCCL_IB_DISABLE", "1", "site")
    assert value.reason.startswith("the site uses no adapter")


def test_storage_servers_of_the_site_are_asked_about(node):
    h100(node)
    node.route("10.8.1.7", "ib3")
    rendered = render_node(node.facts(Site(storage=Storage(servers=("10.8.1.7",)))), Site())
    assert "mlx5_5:1" not in rendered.variables["NCCL_IB_HCA"].split(",")


def test_secrets_are_hidden_by_name_and_inside_addresses():
    assert shown("HF_TOKEN", "abc") == "<redacted>"
    assert shown("http_proxy", "http://me:pass@proxy:8080/x") == "http://<redacted>@proxy:8080/x"
    assert redact({"NCCL_DEBUG": "INFO", "API_KEY": "k"}) == {"API_KEY": "<redacted>", "NCCL_DEBUG": "INFO"}


@pytest.mark.parametrize(
    "name",
    [
        "MYSQL_PWD", "PGPASS", "DB_PASS", "NPM_AUTH", "_AUTH", "GITHUB_PAT", "SENTRY_DSN", "CI_WEBHOOK_URL", "SAS",
        "GOOGLE_CREDENTIALS", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "KUBE_TOKEN", "AZURE_CONNECTION_STRING",
        "HTTP_AUTHORIZATION", "SESSION_COOKIE",
    ],
)  # fmt: skip
def test_a_secret_is_known_by_the_name_of_its_variable(name):
    assert (shown(name, "abc"), is_secret(name, "abc")) == ("<redacted>", True)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("http://user:p@ss@host:80", "http://<redacted>@host:80"),
        ("http://user:p/ss@host/x", "http://<redacted>@host/x"),
        ("https://token@host/x.git", "https://<redacted>@host/x.git"),
        ("postgres://u:p@h/db", "postgres://<redacted>@h/db"),
        ("https://hooks.slack.com/services/T0/B0/abc", "https://hooks.slack.com/services<redacted>"),
        ("https://discord.com/api/webhooks/1/abc", "https://discord.com/api/webhooks<redacted>"),
        ("https://x.webhook.office.com/webhookb2/a/b", "https://x.webhook.office.com/webhookb2<redacted>"),
        ("https://ci.example.org/hooks/abc", "https://ci.example.org/hooks<redacted>"),
        ("https://example.org/in?a=1&token=abc&b=2", "https://example.org/in?a=1&token=<redacted>&b=2"),
        ("https://a.blob.example/c?sv=1&sig=abc%3D&se=2", "https://a.blob.example/c?sv=1&sig=<redacted>&se=2"),
        ("AccountName=n;AccountKey=abc==;E=f", "AccountName=n;AccountKey=<redacted>;E=f"),
        ("Authorization: Bearer abcdef0123456", "Authorization: Bearer <redacted>"),
        ("--with hf_" + "a1" * 12, "--with <redacted>"),
    ],
)
def test_a_secret_inside_a_value_is_hidden_and_the_rest_is_not(value, expected):
    assert (shown("NOTE", value), is_secret("NOTE", value)) == (expected, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("PWD", "/work"), ("OLDPWD", "/"), ("PGPASSFILE", "/etc/pgpass"), ("SSH_AUTH_SOCK", "/tmp/agent"),
        ("XAUTHORITY", "/tmp/x"), ("GIT_AUTHOR_NAME", "Ada"), ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
        ("NCCL_SOCKET_IFNAME", "eth0"), ("TOKENIZERS_PARALLELISM", "false"), ("http_proxy", "http://proxy:8080/x"),
        ("INDEX", "https://pypi.example/simple?format=x"), ("PYTHONPATH", "/a/webhooks/b:/c@d"),
        ("STORE", "tcp://[fe80::1]:29500"), ("NOTE", "sweep.backward=key_value"), ("DATA", "file:///a@b/c"),
        ("REPOSITORY", "git@example.org:a/b.git"),
    ],
)  # fmt: skip
def test_what_operators_need_is_not_hidden(name, value):
    assert (shown(name, value), is_secret(name, value)) == (value, False)


def test_what_replaces_a_secret_does_not_tell_it():
    (value,) = overlaid(
        [Variable(name="A_TOKEN", value="hidden", reason="r")], {"A_TOKEN": "new"}, by="b", origin="user"
    )
    assert value.reason == "b, instead of <redacted> (r)"


def test_every_variable_stands_in_the_documentation(node):
    docs = Path(__file__).parents[3] / "docs"
    page = "".join((docs / name).read_text(encoding="utf-8") for name in ("cluster.md", "reference.md"))
    h100(node)
    site = Site(network=NetworkExpectation(gid_index=3))
    rendered = [render_node(node.facts(site), site), render_node(NodeFacts(node="n"), Site())]
    names = {value.name for each in rendered for value in each.values} | {"NCCL_IB_DISABLE", "NCCL_HOSTID"}
    names |= {value.name for value in trial_values("/logs")}
    documented = set(re.findall(r"`(\w+)`", " ".join(re.findall(r"(?m)^\| ([^|]*) \|", page))))  # first cells of tables
    assert sorted(names - documented) == []


def test_a_site_that_sets_a_search_path_or_preloads_a_library_is_told_what_that_does():
    site = Site(environment={"PATH": "/opt/bin:/bin", "LD_PRELOAD": "/usr/lib/libjemalloc.so"})
    said = " ".join(render_node(NodeFacts(node="n"), site).warnings)
    assert "PATH=/opt/bin:/bin replaces the node's own" in said
    assert "LD_PRELOAD=/usr/lib/libjemalloc.so is loaded into every rank" in said

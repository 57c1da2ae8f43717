from pathlib import Path

import pytest

from cluster.inventory.hosts import Host, distinct, expand, parse_hosts, parse_jump, read_hosts, this_machine


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("gpu7", ["gpu7"]),
        ("gpu[01-03]", ["gpu01", "gpu02", "gpu03"]),
        ("gpu[8-11]", ["gpu8", "gpu9", "gpu10", "gpu11"]),
        ("gpu[098-101]", ["gpu098", "gpu099", "gpu100", "gpu101"]),
        ("gpu[1,3-4].lab", ["gpu1.lab", "gpu3.lab", "gpu4.lab"]),
        ("r[1-2]n[01-02]", ["r1n01", "r1n02", "r2n01", "r2n02"]),
    ],
)
def test_ranges_expand_in_order_and_keep_their_padding(pattern: str, names: list[str]) -> None:
    assert expand(pattern) == names


@pytest.mark.parametrize(
    ("target", "user", "address", "port"),
    [
        ("gpu01", None, "gpu01", None),
        ("root@10.0.0.7:2222", "root", "10.0.0.7", 2222),
        ("fe80::1", None, "fe80::1", None),
        ("ops@[fe80::1]:22", "ops", "fe80::1", 22),
        ("ops@[::1]", "ops", "::1", None),
        ("ops@n[4-5:2]:2222", "ops", "n4", 2222),
        ("n[4-5:2]", None, "n4", None),
        ("[4-5:2]n", None, "4n", None),
    ],
)
def test_a_target_splits_into_user_address_and_port(target: str, user: str, address: str, port: int) -> None:
    assert parse_hosts(target) == [Host(name=address, address=address, user=user, port=port)]


@pytest.mark.parametrize(
    ("target", "word"),
    [
        ("gpu[04-01]", "counts down"),
        ("gpu[01-", "is not a host"),
        ("gpu[]", "range"),
        ("gpu[0-4:0]", "step 0"),
        ("gpu[4:2]", "range"),
        ("gpu[1-2", "is not a host"),
        ("gpu[1-2],", "is not a host"),
        ("a,b:x", "port 'x'"),
        ("gpu[1-99999999]", "more than 10000"),
        ("r[1-200]n[1-200]", "40000 hosts"),
        ("-oProxyCommand=x", "is not a host"),
        ("gpu01;reboot", "is not a host"),
        ("gpu01:ssh", "port 'ssh'"),
        ("gpu01:70000", "port '70000'"),
        ("a b@gpu01", "user 'a b'"),
        ("@gpu01", "user ''"),
        ("", "is not a host"),
    ],
)
def test_a_malformed_target_is_refused_with_its_reason(target: str, word: str) -> None:
    with pytest.raises(ValueError, match=r"expected|write|check") as caught:
        parse_hosts(target)
    assert word in str(caught.value)


def test_a_hosts_file_holds_targets_ranges_and_comments(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("# rack one\ngpu[01-02]   # both ours\n\nroot@spare:2222\n")
    assert [host.target for host in read_hosts(path)] == ["gpu01", "gpu02", "root@spare:2222"]


def test_a_hosts_file_of_another_system_is_read(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_bytes(b"\xef\xbb\xbfgpu01\r\ngpu02\r\n")  # a byte order mark and its ends of line
    assert [host.target for host in read_hosts(path)] == ["gpu01", "gpu02"]


def test_a_bad_line_of_a_hosts_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "hosts"
    path.write_text("gpu01\ngpu[3-1]\n")
    with pytest.raises(ValueError, match=r"hosts:2: 'gpu\[3-1\]' counts down"):
        read_hosts(path)


@pytest.mark.parametrize("content", ["", "# nobody\n"])
def test_a_hosts_file_without_hosts_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(content)
    with pytest.raises(ValueError, match="names no host"):
        read_hosts(path)


def test_a_missing_hosts_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such hosts file"):
        read_hosts(tmp_path / "absent")


def test_a_host_named_twice_is_checked_once_and_shared_names_become_targets() -> None:
    hosts = [host for target in ("a", "a", "b:1", "b:2") for host in parse_hosts(target)]
    assert [host.name for host in distinct(hosts)] == ["a", "b:1", "b:2"]


def test_defaults_fill_only_what_the_target_left_open() -> None:
    (host,) = parse_hosts("root@gpu01")
    filled = host.with_defaults(user="ops", port=2222, key=Path("id"))
    assert (filled.target, filled.key) == ("root@gpu01:2222", Path("id"))


def test_this_machine_needs_no_address() -> None:
    assert this_machine().is_local
    assert not parse_hosts("localhost")[0].is_local


def test_an_ipv6_range_expands_like_any_other() -> None:
    assert [host.target for host in parse_hosts("ops@fd00::[1-2]")] == ["ops@[fd00::1]", "ops@[fd00::2]"]


def test_targets_with_commas_between_have_their_own_users_and_ports() -> None:
    assert [host.target for host in parse_hosts("ops@a[1-2]:22,b,fd00::[1,3]")] == [
        "ops@a1:22", "ops@a2:22", "b", "[fd00::1]", "[fd00::3]",
    ]  # fmt: skip


def test_jump_hosts_are_a_chain_whose_last_is_nearest_to_the_node() -> None:
    jump = parse_jump("ops@outer:2200, inner", Path("k"))
    assert (jump.target, jump.key) == ("inner", Path("k"))
    assert jump.jump is not None
    assert (jump.jump.target, jump.jump.key, jump.jump.jump) == ("ops@outer:2200", Path("k"), None)


@pytest.mark.parametrize("text", ["", "a,", "gpu[1-2]", "a;b"])
def test_a_jump_host_is_one_host(text: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        parse_jump(text, None)

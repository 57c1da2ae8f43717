from pathlib import Path

import pytest

from cluster.site import DiskLimit, Site, load_site

SITES = Path(__file__).parents[2] / "experiments" / "sites"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("path", sorted(SITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_site_of_the_repository_loads_under_its_own_name(path: Path) -> None:
    assert load_site(path).name == path.stem


def test_local_yaml_is_what_no_site_means() -> None:
    assert load_site(SITES / "local.yaml") == Site()


def test_a_site_states_gpus_disks_memory_and_login(tmp_path: Path) -> None:
    site = load_site(
        write(
            tmp_path,
            "name: lab\ngpus: {count: 8, model: H200}\nhost_memory: {warn_percent: 80}\n"
            "disks: [{path: /data, warn_percent: 70}]\nssh: {user: ops, port: 2222, key: ~/.ssh/lab}\n",
        )
    )
    assert (site.gpus.count, site.gpus.model, site.host_memory.warn_percent) == (8, "H200", 80.0)
    assert site.disks == (DiskLimit(path="/data", warn_percent=70.0, fail_percent=95.0),)
    assert (site.ssh.user, site.ssh.port, site.ssh.key) == ("ops", 2222, Path("~/.ssh/lab"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\ngpu: {count: 8}\n", r":2: unknown key gpu; did you mean gpus\?"),
        ("gpus:\n  cuont: 8\n", r":2: unknown key gpus.cuont; did you mean count\?"),
        ("zzz: 1\n", ":1: unknown key zzz; expected name, gpus"),
        ("gpus: {count: eight}\n", ":1: gpus.count is 'eight'; expected a whole number or null"),
        ("gpus: {count: true}\n", "expected a whole number or null"),
        ("gpus: {count: -1}\n", "gpus.count is -1; expected 0 or more"),
        ("gpu_memory: {one_gpu_mib: .nan}\n", ":1: gpu_memory.one_gpu_mib is nan; expected a number"),
        ("gpus: 8\n", ":1: gpus is 8; expected a mapping of count, model"),
        ("ssh: {user: yes}\n", ":1: YAML reads the bare word yes as a truth value"),
        ("disks: /data\n", ":1: disks is '/data'; expected a list"),
        ("disks:\n- {warn_percent: 5}\n", ":2: disks lacks path"),
        ("disks: [{path: data}]\n", "expected an absolute path"),
        ("disks: [{path: /, fail_percent: 120}]\n", "fail_percent of / is 120; expected a percentage"),
        ("disks: [{path: /, warn_percent: 96}]\n", "warns at 96% but fails at 95%"),
        ("name: x\nname: y\n", ":2: the key name was already given at .*:1; keep one of the two"),
        ("name: [x\n", ":2: not readable as YAML"),
        ("name: !!python/object/apply:os.system [x]\n", ":1: found the YAML tag .*; write plain values without tags"),
        ("", "is empty"),
        ("- a\n", "the site file is a list; expected a mapping"),
    ],
)
def test_a_wrong_site_is_refused_with_file_line_and_what_to_write(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        load_site(write(tmp_path, text))
    assert str(caught.value).startswith(str(tmp_path / "site.yaml"))


def test_a_missing_site_file_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such site file; check the path"):
        load_site(tmp_path / "absent.yaml")

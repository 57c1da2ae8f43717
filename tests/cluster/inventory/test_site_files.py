from pathlib import Path

import pytest

from cluster.inventory.site import DiskLimit, Mount, SharedPath, Site, load_site

SITES = Path(__file__).parents[3] / "experiments" / "sites"


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


def test_network_storage_container_and_environment_are_read_as_they_are_written(tmp_path: Path) -> None:
    site = load_site(
        write(
            tmp_path,
            "network: {interface: ib0, hcas: ['mlx5_2:1'], port_rate_gbps: 400}\n"
            "storage: {shared: [{path: /data, write: false}], servers: [10.0.0.9]}\n"
            "container: {engine: docker, image: 'burst:1', mounts: [{source: /data}], ulimits: {memlock: -1}}\n"
            "environment: {NCCL_IB_TC: 106, NCCL_DEBUG: INFO}\n",
        )
    )
    assert (site.network.interface, site.network.hcas) == ("ib0", ("mlx5_2:1",))
    assert site.network.port_rate_gbps == 400.0
    assert site.storage.shared == (SharedPath(path="/data", write=False),)
    assert site.container.mounts == (Mount(source="/data"),)
    assert site.container.ulimits == {"memlock": "-1"}
    assert site.environment == {"NCCL_IB_TC": "106", "NCCL_DEBUG": "INFO"}


def test_no_adapters_and_any_adapters_are_different_values(tmp_path: Path) -> None:
    assert load_site(write(tmp_path, "network: {hcas: []}\n")).network.hcas == ()
    assert load_site(write(tmp_path, "network: {hcas: null}\n")).network.hcas is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: x\ngpu: {count: 8}\n", r":2: unknown key gpu; did you mean gpus\?"),
        ("gpus:\n  cuont: 8\n", r":2: unknown key gpus.cuont; did you mean count\?"),
        ("zzz: 1\n", ":1: unknown key zzz; expected name, gpus"),
        ("gpus: {count: eight}\n", ":1: gpus.count is 'eight'; expected a whole number or null"),
        ("gpus: {count: true}\n", "expected a whole number or null"),
        ("gpus: {count: -1}\n", "gpus.count is -1; expected 0 or more"),
        ("gpu_memory: {one_gpu_mib: .nan}\n", ":1: gpu_memory.one_gpu_mib is nan; expected a finite number"),
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
        ("network: {interface: 'eth0;id'}\n", "network.interface is 'eth0;id'; expected one interface's name"),
        ("network: {hcas: ['=mlx5_1']}\n", "network.hcas has '=mlx5_1'; expected names such as mlx5_2"),
        ("network: {hcas: mlx5_1}\n", ":1: network.hcas is 'mlx5_1'; expected a list"),
        ("network: {port_rate_gbps: 0}\n", "network.port_rate_gbps is 0; expected more than 0"),
        ("network: {gid_index: -1}\n", "network.gid_index is -1; expected 0 to 255"),
        ("storage: {shared: [{path: data}]}\n", "storage.shared has the path 'data'; expected an absolute path"),
        ("storage: {servers: [filer]}\n", "storage.servers has 'filer'; expected an IP address"),
        ("ssh: {user: 'root; rm'}\n", "ssh.user is 'root; rm'; expected letters, digits"),
        ("ssh: {user: ''}\n", "ssh.user is ''; expected letters, digits"),
        ("ssh: {user: ops@gpu01}\n", "ssh.user is 'ops@gpu01'; expected letters, digits"),
        ("environment: {PATH: '/opt/bin:$PATH'}\n", "no shell expands a '.' on the nodes"),
        ("environment: {PATH: 'bin:/usr/bin'}\n", "environment.PATH is 'bin:/usr/bin'; expected absolute paths"),
        ("environment: {PATH: '/usr/bin:'}\n", "environment.PATH is '/usr/bin:'; expected absolute paths"),
        ("environment: {LD_PRELOAD: libjemalloc.so}\n", "LD_PRELOAD is 'libjemalloc.so'; expected absolute paths"),
        ("software: {python: venv/bin/python}\n", "software.python is 'venv/bin/python'; expected an absolute path"),
        (
            "container: {engine: singularity}\n",
            ":1: container.engine is 'singularity'; expected none, docker or podman",
        ),
        ("container: {engine: docker}\n", "container.engine is docker but container.image is empty"),
        ("container: {image: '--privileged'}\n", "container.image is '--privileged'; expected a name"),
        ("container: {image_id: latest}\n", "container.image_id is 'latest'; expected sha256:"),
        ("container: {mounts: [{source: data}]}\n", "container.mounts has 'data'; expected an absolute path"),
        ("container: {ulimits: {memlock: lots}}\n", "container.ulimits has memlock: lots; expected numbers"),
        ("container: {ulimits: {memlock: true}}\n", "container.ulimits.memlock is true; expected text"),
        ("ray: {head_port: 70000}\n", "ray.head_port is 70000; expected 0 to 65535"),
        ("ray: {head_port: 20001}\n", "ray would use port 20001 twice"),
        ("ray: {dashboard_port: 6379}\n", "ray would use port 6379 twice"),
        ("ray: {worker_port_first: 30000}\n", "ray's worker ports are 30000 to 20999; expected a range"),
        ("ray: {temp_dir: tmp}\n", "ray.temp_dir is 'tmp'; expected an absolute path"),
        ("ranks_per_node: 0\n", "ranks_per_node is 0; expected 1 to 1024"),
        ("environment: {A-B: x}\n", "environment has the name 'A-B'; expected letters"),
        ("environment: {NCCL_DEBUG: true}\n", "environment.NCCL_DEBUG is true; expected text; write it in quotes"),
        ("environment: [NCCL_DEBUG]\n", ":1: environment is a list; expected a mapping of names to text"),
        ("ssh: {jump: 'a;b'}\n", ":1: 'a;b' is not a host"),
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

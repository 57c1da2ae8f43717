"""The paper's set-ups: what each node has to run for one of its systems, from the adapter that `burst run` uses.

The paper's nodes have eight GPUs each. All systems get one NCCL setting, rendered for a site as `burst cluster env`
does; as published, each has what its own script in the artifact set. Starts nothing and needs no GPU.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from baselines.handicaps import handicaps, published, with_own_nccl
from baselines.install.places import InstallPlace
from baselines.paper_cluster import GPUS_PER_NODE
from baselines.pin import FOLDER
from baselines.upstream import Upstream
from cluster.discovery.facts import Gpu, NodeFacts, Port
from cluster.environment.rendering import render_node
from cluster.files.errors import UsageError
from cluster.inventory.site import Site
from engine.settings import Checkpoint, Schedule, Steps, TrialSettings
from engine.shape import ModelShape

ROOT = "/burst"  # the checkout's folder on the nodes
TRIAL = "paper-setup"  # folder of the set-up's files, below the checkout
_A800 = 8.0  # compute capability
_CORES = 128
_PORT = 29500


@dataclass(frozen=True, kw_only=True, slots=True)
class Paper:
    """What the paper's runs of one system set, beside model, length and ranks."""

    package: str
    steps: Steps
    checkpoint: Checkpoint
    optimizer_offload: bool
    learning_rate: float
    schedule: Schedule = "auto"
    data: str = ""  # on the nodes, where the system cannot run without
    source: str  # the script that starts it, in thunlp/BurstEngine at 426eb7a


_WHOLE = Checkpoint(every=1, tail=0.0)
# The names that `burst setup baselines show` takes.
SETUPS: dict[str, Paper] = {
    "megatron_lm": Paper(
        package="megatron_lm",
        steps=Steps(warmup=3, measured=7),
        checkpoint=_WHOLE,
        optimizer_offload=False,
        learning_rate=6e-5,
        source="evaluation/baselines/Megatron-LM/multi.sh",
    ),
    "megatron_deepspeed": Paper(
        package="megatron_deepspeed",
        steps=Steps(warmup=3, measured=7),
        checkpoint=_WHOLE,
        optimizer_offload=True,
        learning_rate=2e-5,
        data="/data/codeparrot_content_document",
        source="evaluation/baselines/Megatron-DeepSpeed/script/ulysses.sh",
    ),
    "internevo_double_ring": Paper(
        package="internevo",
        steps=Steps(warmup=2, measured=3),
        checkpoint=_WHOLE,
        optimizer_offload=True,
        learning_rate=1e-4,
        schedule="double_ring",
        source="evaluation/baselines/InternEvo/exp.sh, configs/7B_llama2.py",
    ),
    "internevo_usp": Paper(
        package="internevo",
        steps=Steps(warmup=2, measured=3),
        checkpoint=_WHOLE,
        optimizer_offload=True,
        learning_rate=1e-4,
        schedule="usp",
        source="evaluation/baselines/InternEvo/exp.sh, configs/7B_llama2.py",
    ),
    "burst_engine": Paper(
        package="burst_engine",
        steps=Steps(warmup=1, measured=2),
        checkpoint=Checkpoint(every=1, tail=0.5),
        optimizer_offload=True,
        learning_rate=1.5e-4,
        source="BurstEngine/apps/llama/multi.sh",
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSetup:
    """What one node runs; every string is for the shell of that node."""

    node: int  # from 0
    nodes: int
    environment: dict[str, str]
    command: tuple[str, ...]
    folder: str  # working directory
    files: dict[str, str] = field(default_factory=dict)  # absolute path -> content


def trial(
    system: str, model: ModelShape, *, cp_size: int, nodes: int, seq_len: int, as_published: bool, data: str = ""
) -> TrialSettings:
    """The settings of one of the paper's runs, or a UsageError that says why it cannot be."""
    if system not in SETUPS:
        raise UsageError(f"there is no set-up of the paper for {system}; choose one of {', '.join(SETUPS)}")
    world_size = nodes * GPUS_PER_NODE
    if cp_size < 1 or world_size % cp_size:
        raise UsageError(
            f"--cp is {cp_size}, and {nodes} nodes have {world_size} GPUs; choose a --cp that divides {world_size}, or "
            "other --nodes"
        )
    paper = SETUPS[system]
    settings = TrialSettings(
        method=f"{paper.package}_upstream",
        task="train",
        model=model,
        seq_len=seq_len,
        cp_size=cp_size,
        world_size=world_size,
        schedule=paper.schedule,
        steps=paper.steps,
        checkpoint=paper.checkpoint,
        optimizer_offload=paper.optimizer_offload,
        learning_rate=paper.learning_rate,
        **({"data": data or paper.data} if data or paper.data else {}),  # type: ignore[arg-type]
    )
    if as_published:
        settings = replace(settings, settings="as_published")
    if reason := _method(system).refuse(settings):
        raise UsageError(reason)
    return settings


def node_environment(settings: TrialSettings, site: Site) -> dict[str, str]:
    """The variables of one node of the site: one setting for all systems, or what the system's own script sets."""
    named: Sequence[str] = site.network.hcas or ()
    facts = NodeFacts(
        node="node",
        cores=_CORES,
        gpus=tuple(Gpu(address=f"0000:{index:02x}:00.0", compute_capability=_A800) for index in range(GPUS_PER_NODE)),
        ports=tuple(_port(name) for name in named),
    )
    return with_own_nccl(settings, render_node(facts, site, method=settings.method, ranks=GPUS_PER_NODE).variables)


def render(
    system: str, settings: TrialSettings, site: Site, *, nodes: int, head: str, root: str = ROOT, port: int = _PORT
) -> list[NodeSetup]:
    """What each node runs, the head first. `root` is the checkout's folder on the nodes."""
    method, trial_dir = _method(system), Path(root) / TRIAL
    place = InstallPlace(system=method.package, flavour="paper")
    made = method.render(settings, trial_dir, place)

    def there(text: str) -> str:
        return text.replace(str(FOLDER), f"{root}/baselines")

    program = [there(word) for word in made.command]
    # torchrun, as in the artifact's scripts, gives each of the eight ranks its number.
    words = program[program.index("-u") + 1 :]
    environment = node_environment(settings, site) | {
        "PYTHONUNBUFFERED": "1",
        **{name: there(value) for name, value in made.environment.items()},
    }
    return [
        NodeSetup(
            node=node,
            nodes=nodes,
            environment=environment,
            command=(
                program[0], "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node",
                str(GPUS_PER_NODE), "--node-rank", str(node), "--rdzv-id", "1", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", f"{head}:{port}", *words,
            ),
            folder=there(made.folder) or str(trial_dir),
            files={str(trial_dir / path): there(content) for path, content in made.files.items()},
        )
        for node in range(nodes)
    ]  # fmt: skip


def script(setup: NodeSetup) -> str:
    """One node's set-up as a POSIX shell script: it writes the files, sets the variables and starts the program."""
    lines = [f"# node {setup.node + 1} of {setup.nodes}"]
    for folder in dict.fromkeys([setup.folder, *(str(Path(path).parent) for path in setup.files)]):
        lines.append(f"mkdir -p {shlex.quote(folder)}")
    for path, content in setup.files.items():
        lines.append(f"printf %s {shlex.quote(content)} > {shlex.quote(path)}")
    # Always quoted: a shell such as zsh would read the second = of NCCL_SOCKET_IFNAME==bond0 as the path of a program.
    lines += [f"export {name}={_quoted(value)}" for name, value in sorted(setup.environment.items())]
    lines.append(f"cd {shlex.quote(setup.folder)} && exec {shlex.join(setup.command)}")
    return "\n".join(lines) + "\n"


def _quoted(value: str) -> str:
    return "'" + value.replace("'", "'\"'\"'") + "'"


def remarks(system: str, settings: TrialSettings) -> Sequence[str]:
    """The handicaps of the system as sentences, each with its source; those that are switched on say so."""
    lines = []
    for one in handicaps(settings.method):
        state = "applied" if published(settings) and one.applied else "not applied" if one.applied else "in words alone"
        side = "slows it down" if one.against == "this" else "helps it"
        lines.append(f"{one.what} ({side}; {state}; {one.source})")
    return lines


def _method(system: str) -> Upstream:
    found: Upstream = importlib.import_module(f"baselines.{SETUPS[system].package}").METHOD
    return found


def _port(name: str) -> Port:
    """An adapter that the site names, as it would be found: `mlx5_2` or `mlx5_2:1`."""
    hca, _, number = name.partition(":")
    return Port(
        hca=hca, number=int(number or 1), state="ACTIVE", phys_state="LinkUp", rate_gbps=None, link_layer="InfiniBand"
    )

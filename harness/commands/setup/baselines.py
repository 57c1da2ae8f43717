"""`burst setup baselines`: the upstream systems, each in an environment of its own, and the paper's runs of them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cluster.files.progress import Progress
from harness.base.errors import UsageError
from harness.base.writable import make_writable

if TYPE_CHECKING:
    from baselines.install.places import InstallPlace

ALL_WELL, NOT_ALL = 0, 1
_MAX_NODES = 4096


class BaselinesCommand:
    help = "install upstream systems, unmodified, and compare what is installed with its pin"

    def configure(self, parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="list|install|check|bundle|fidelity|show")
        listing = actions.add_parser("list", help="every system and flavour, its licence, and whether it is installed")
        listing.add_argument("--json", action="store_true", help="one JSON list instead of a table")
        install = actions.add_parser("install", help="fetch a system as its pin says, and make its environment")
        _add_place(install)
        install.add_argument(
            "--python", type=Path, metavar="PATH", help="interpreter that has the torch it needs (default: burst's own)"
        )
        install.add_argument(
            "--from", type=Path, dest="given", metavar="DIR",
            help="a bundle, or a folder with wheels and clones, instead of the network",
        )  # fmt: skip
        install.add_argument("--anew", action="store_true", help="remove what is installed first")
        install.add_argument(
            "--borrow",
            action="store_true",
            help="use common packages that lie beside torch, in the version they have there",
        )
        install.add_argument(
            "--build", action="append", default=[], metavar="PACKAGE=ARCHIVE",
            help="another build of a pinned package, of the same version",
        )  # fmt: skip
        install.add_argument("--build-note", default="", metavar="WORDS", help="how that build differs; tables show it")
        check = actions.add_parser("check", help="compare installed systems with their pins; 1 when one differs")
        check.add_argument("systems", nargs="*", metavar="SYSTEM", help="default: all that are installed")
        check.add_argument("--json", action="store_true", help="one JSON list instead of a table")
        bundle = actions.add_parser("bundle", help="pack what an installation needs, for nodes without a network")
        _add_place(bundle)
        bundle.add_argument("--out", type=Path, required=True, metavar="FILE.tar", help="the archive to write")
        bundle.add_argument(
            "--python",
            type=Path,
            metavar="PATH",
            help="interpreter whose version the wheels are for (default: burst's own)",
        )
        bundle.add_argument("--python-version", default="", metavar="3.12", help="the version alone, for Linux")
        bundle.add_argument(
            "--from", type=Path, dest="given", metavar="DIR", help="a folder with a clone of the source"
        )
        bundle.add_argument(
            "--borrow", action="store_true", help="leave out packages that install --borrow finds there"
        )
        bundle.add_argument(
            "--without", action="append", default=[], metavar="PACKAGE", help="leave out one that install --build gives"
        )
        fidelity = actions.add_parser(
            "fidelity", help="run systems on CPU ranks, beside dense float64 and beside our native baselines"
        )
        fidelity.add_argument("systems", nargs="*", metavar="SYSTEM", help="default: all that are installed")
        fidelity.add_argument(
            "--out", type=Path, default=Path("results/runs/fidelity"), metavar="DIR",
            help="receives fidelity.jsonl with a line per system, fidelity.csv and "
            "fidelity.md; systems that are there are kept",
        )  # fmt: skip
        fidelity.add_argument("--anew", action="store_true", help="run systems that are there again")
        fidelity.add_argument("--case", metavar="NAME", help="one case of one system, printed; writes nothing to --out")

        _add_show(actions)

    def run(self, arguments: argparse.Namespace) -> int:
        if arguments.action == "show":
            return _show_setup(arguments)
        if arguments.action == "list":
            return _list(as_json=arguments.json)
        if arguments.action == "check":
            return _check(arguments.systems, as_json=arguments.json)
        if arguments.action == "fidelity":
            return _fidelity(arguments)
        place = _place(arguments)
        if arguments.action == "install":
            from baselines.install.build import install_system
            from baselines.install.packages import other_builds

            with Progress(f"installing {place.system} ({place.flavour})"):
                install_system(
                    place,
                    python=arguments.python,
                    given=arguments.given,
                    anew=arguments.anew,
                    borrow=arguments.borrow,
                    builds=other_builds(arguments.build, arguments.build_note),
                )
            return ALL_WELL
        from baselines.install.bundle import make_bundle

        make_writable(arguments.out.absolute().parent)
        with Progress(f"fetching and packing what {place.system} ({place.flavour}) needs"):
            make_bundle(
                place,
                arguments.out,
                python=arguments.python,
                version=arguments.python_version,
                given=arguments.given,
                borrow=arguments.borrow,
                leave_out=arguments.without,
            )
        print(f"{arguments.out}: {arguments.out.stat().st_size / 2**20:.1f} MiB")
        print(f"Next, on the other machine: {place.install_command} --from {arguments.out.name}")
        return ALL_WELL


def _add_place(parser: argparse.ArgumentParser) -> None:
    from baselines.pin import FLAVOURS

    parser.add_argument("system", metavar="SYSTEM", help="a name that burst setup baselines list shows")
    parser.add_argument("--flavour", choices=FLAVOURS, help="paper or current (default: current, where there is one)")


def _place(arguments: argparse.Namespace) -> InstallPlace:
    """The place that a command line names. Raises UsageError for a system or flavour that is not pinned."""
    from baselines.install.places import InstallPlace
    from baselines.pin import load_pin

    pin = load_pin(arguments.system)
    flavour = arguments.flavour or pin.flavours[-1]
    pin.flavour(flavour)
    return InstallPlace(system=arguments.system, flavour=flavour)


def _add_show(actions: Any) -> None:
    show = actions.add_parser("show", help="what each node runs for one of the paper's systems; starts nothing")
    show.add_argument("system", metavar="SYSTEM", help="such as megatron_lm, internevo_usp or burst_engine")
    show.add_argument("--model", default="7b", metavar="NAME", help="a model of experiments/models (default: 7b)")
    show.add_argument("--cp", type=int, default=32, metavar="N", help="context-parallel ranks (default: 32)")
    show.add_argument(
        "--nodes", dest="node_count", type=int, metavar="N", help="nodes of eight GPUs (default: as many as --cp needs)"
    )
    show.add_argument("--seq-len", default="1M", metavar="N", help="tokens of a sequence (default: 1M)")
    show.add_argument(
        "--settings", choices=("equal", "as_published"), default="equal",
        help="as_published: with what set the systems apart in the paper's runs, as baselines/handicaps.yaml lists it",
    )  # fmt: skip
    show.add_argument("--site", type=Path, metavar="FILE", help="site file of the nodes (default: the paper's nodes)")
    show.add_argument("--head", default="node1", metavar="HOST", help="the first node's name or address")
    show.add_argument("--root", default="/burst", metavar="DIR", help="this checkout's folder on the nodes")
    show.add_argument("--data", default="", metavar="PATH", help="data on the nodes, in the system's own format")
    show.add_argument("--json", action="store_true", help="one JSON list, an object for each node, instead of scripts")


def _show_setup(arguments: argparse.Namespace) -> int:
    """The set-up of each node as a shell script on stdout, and the handicaps on stderr."""
    from dataclasses import asdict

    from baselines import paper_cluster, setups
    from cluster.inventory.site import load_site
    from harness.base.lengths import parse_length
    from harness.spec.models import MODELS_DIR, load_model

    path = MODELS_DIR / f"{arguments.model.replace('-', '_')}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(each.stem for each in MODELS_DIR.glob("*.yaml")))
        raise UsageError(f"--model is {arguments.model}; choose one of {known}")
    nodes = (
        max(1, -(-arguments.cp // paper_cluster.GPUS_PER_NODE))
        if arguments.node_count is None
        else arguments.node_count
    )
    if not 1 <= nodes <= _MAX_NODES:
        raise UsageError(f"--nodes is {nodes}; expected 1 to {_MAX_NODES}")
    if not arguments.root.startswith("/"):
        raise UsageError(f"--root is {arguments.root}; expected an absolute path on the nodes")
    try:
        seq_len = parse_length(arguments.seq_len)
    except ValueError as error:
        raise UsageError(f"--seq-len: {error}") from None
    settings = setups.trial(
        arguments.system,
        load_model(path),
        cp_size=arguments.cp,
        nodes=nodes,
        seq_len=seq_len,
        as_published=arguments.settings == "as_published",
        data=arguments.data,
    )
    site = load_site(arguments.site or MODELS_DIR.parent / "sites" / "paper.yaml")
    found = setups.render(arguments.system, settings, site, nodes=nodes, head=arguments.head, root=arguments.root)
    if arguments.json:
        print(json.dumps([asdict(each) for each in found], indent=1))
    else:
        print("\n".join(setups.script(each) for each in found), end="")
    for line in setups.remarks(arguments.system, settings):
        print(f"# {line}", file=sys.stderr)
    return ALL_WELL


def _list(*, as_json: bool) -> int:
    from baselines.install.places import places

    rows = []
    for place in places():
        pin, pinned = place.pin, place.pinned
        condition, sentence = place.condition()
        rows.append(
            {
                "system": place.system,
                "flavour": place.flavour,
                "name": pin.system,
                "what": _what(place),
                "runs on": " and ".join("GPU" if device == "cuda" else "CPU" for device in pinned.devices),
                "needs": f"Python {pinned.python}, torch {pinned.torch}",
                "licence": pin.licence,
                "home": pin.home,
                "state": condition,
                "sentence": sentence,
                "note": pinned.note,
            }
        )
    _show(rows, ["system", "flavour", "what", "runs on", "needs", "state"], as_json=as_json)
    return ALL_WELL


def _what(place: InstallPlace) -> str:
    """The release or commit, in a few words."""
    pinned = place.pinned
    if pinned.checkout is not None:
        where = "" if pinned.checkout.subtree == "." else f" of {pinned.checkout.repository.rpartition('/')[2]}"
        return f"{pinned.checkout.commit[:12]}{where}"
    return next(iter(pinned.packages)).replace("==", " ")


def _fidelity(arguments: argparse.Namespace) -> int:
    """0 whatever the verdicts, which are results."""
    from baselines.fidelity.run import run_system, run_systems
    from harness.records.provenance import commit

    if arguments.case and len(arguments.systems) != 1:
        raise UsageError(f"--case is one case of one system, found {len(arguments.systems)} systems; name one")
    if not arguments.case:
        make_writable(arguments.out)
    with Progress(f"running cases of {', '.join(arguments.systems) or 'all installed systems'}"):
        if arguments.case:
            rows = run_system(arguments.systems[0], commit(), [arguments.case]).rows
        else:
            rows = run_systems(arguments.systems, arguments.out, commit(), anew=arguments.anew)
    shown = [
        {
            "system": row.system,
            "case": row.case,
            "worst error": "" if row.worst is None else f"{row.worst:.1e}",
            "bytes sent": "" if row.sent_bytes is None else f"{row.sent_bytes:,}",
            "verdict": row.verdict,
            "what was found": row.found,
        }
        for row in rows
    ]
    _show(shown, ["system", "case", "worst error", "bytes sent", "verdict", "what was found"], as_json=False)
    if not arguments.case:
        print(f"The table: {arguments.out / 'fidelity.md'}")
    return ALL_WELL


def _check(systems: Sequence[str], *, as_json: bool) -> int:
    from baselines.install.places import places
    from baselines.install.verify import verify

    chosen = [place for system in systems for place in places(system)] if systems else places()
    rows = []
    for place in chosen:
        condition, sentence = place.condition()
        if condition == "not installed" and not systems:
            continue
        if condition == "installed":
            with Progress(f"comparing {place.system} ({place.flavour}) with its pin", quiet=as_json):
                verdict = verify(place)
            if verdict.problems:
                condition = "broken"
                more = f" and {len(verdict.problems) - 1} more" if len(verdict.problems) > 1 else ""
                sentence = f"{verdict.problems[0]}{more}; install it anew: {place.install_command} --anew"
        rows.append({"system": place.system, "flavour": place.flavour, "state": condition, "what was found": sentence})
    if not rows:
        print("no compared system is installed; burst setup baselines list shows them")
        return ALL_WELL
    _show(rows, ["system", "flavour", "state", "what was found"], as_json=as_json)
    return ALL_WELL if all(row["state"] in ("installed", "not installed") for row in rows) else NOT_ALL


def _show(rows: list[dict[str, str]], columns: list[str], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(rows, indent=1))
        return
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from harness.base.terminal import print_table, stdout_console

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(Text(row[name]) for name in columns))
    print_table(stdout_console(), table)

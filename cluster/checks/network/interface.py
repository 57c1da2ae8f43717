"""The network interface of the site: there, up, with an address and the right MTU?"""

from __future__ import annotations

import json
from typing import Any

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict


def probe(site: Site) -> Probe:
    """Everything the kernel says about interfaces, as JSON."""
    return Probe(script="command -v ip >/dev/null 2>&1 || exit 127\nip -json addr show")


def judge(output: Output, site: Site) -> Verdict:
    """Warns where the interface differs from the site's; a site that names none accepts any."""
    wanted = site.network.interface
    if output.exit_status == 127:
        if wanted is None and site.network.mtu is None:
            return Verdict(level="ok", summary="no ip command; the site names no interface to look for")
        return Verdict(level="unknown", summary="no ip command to read interfaces with; install iproute2")
    try:
        links: dict[str, dict[str, Any]] = {str(link["ifname"]): link for link in json.loads(output.text) if link}
    except (ValueError, TypeError, KeyError):
        return Verdict(level="unknown", summary=f"ip -json printed no list of interfaces ({output.first_line})")
    up = {name: link for name, link in links.items() if _addresses(link) and "UP" in link.get("flags", ())}
    if wanted is None:
        names = ", ".join(printable(name) for name in up if name != "lo") or "none but loopback"
        return Verdict(level="ok", summary=f"up: {names}")
    if wanted not in links:
        return _warning(f"{wanted} is absent; there are {', '.join(printable(name) for name in sorted(links))}")
    link = links[wanted]
    if wanted not in up or link.get("operstate") == "DOWN":
        return _warning(f"{wanted} is {printable(str(link.get('operstate', '?')))} or has no address; expected it up")
    mtu = link.get("mtu")
    if site.network.mtu is not None and mtu != site.network.mtu:
        return _warning(f"{wanted} has an MTU of {mtu}; the site expects {site.network.mtu}")
    return Verdict(level="ok", summary=f"{wanted} is up at {_addresses(link)[0]}, MTU {mtu}", facts={"mtu": mtu})


def _addresses(link: dict[str, Any]) -> list[str]:
    return [printable(str(entry.get("local"))) for entry in link.get("addr_info", ()) if entry.get("local")]


def _warning(summary: str) -> Verdict:
    return Verdict(level="warn", summary=f"{summary} (network.interface)", action="monitor")


CHECK = Check(source="ip-address(8) of iproute2", probe=probe, judge=judge)

"""Processes that cannot end: zombies, and processes stuck in the kernel."""

from __future__ import annotations

from cluster.checks import Check
from cluster.inventory.site import Site
from cluster.probing.probe import Output, Probe, printable
from cluster.probing.verdict import Verdict

_SHOWN = 5
# Both states are normal for a moment, so only processes that a second look finds again are reported. Threads of the
# kernel (their parent is process 2) wait in state D by design.
PROBE = Probe(
    script="""
look() {
    ps -eo state=,ppid=,pid=,user=,comm= |
        awk '$1 ~ /^Z/ || ($1 ~ /^D/ && $2 != 2) { print substr($1, 1, 1), $3, $4, $5 }'
}
command -v ps >/dev/null 2>&1 || exit 127
first=$(look)
if [ -n "$first" ]; then
    sleep 1
    look | while IFS= read -r line; do
        case "
$first
" in *"
$line
"*) printf 'stuck %s\\n' "$line" ;; esac
    done
fi
echo end
"""
)


def judge(output: Output, site: Site) -> Verdict:
    """Warns and names them; a process stuck in the kernel often holds a GPU or waits for a dead mount."""
    lines = output.text.splitlines()
    if output.exit_status == 127:
        return Verdict(level="unknown", summary="no ps command to list processes with; install procps")
    if "end" not in lines:
        return Verdict(level="unknown", summary=f"processes cannot be listed ({output.first_line})")
    stuck = [printable(line.removeprefix("stuck ")).split(" ", 3) for line in lines if line.startswith("stuck ")]
    by_state = {
        words: [f"{name} (pid {pid}, {user})" for state, pid, user, name in stuck if state == letter]
        for letter, words in (("D", "stuck in the kernel"), ("Z", "zombie"))
    }
    parts = [
        f"{len(found)} {words}: {', '.join(found[:_SHOWN])}{' ...' if len(found) > _SHOWN else ''}"
        for words, found in by_state.items()
        if found
    ]
    if parts:
        return Verdict(level="warn", summary="; ".join(parts), action="monitor")
    return Verdict(level="ok", summary="no zombie, and none stuck in the kernel")


CHECK = Check(source="ps(1); facebookresearch/gcm (zombies)", probe=lambda site: PROBE, judge=judge)

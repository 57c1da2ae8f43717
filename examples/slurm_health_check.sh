#!/bin/sh
# Slurm's HealthCheckProgram: drains this node when a check fails, and resumes it when the checks pass again.
# See docs/cluster.md. slurmd runs it as root and ends it after 60 seconds.

BURST=${BURST:-/opt/burst/.venv/bin/burst}
SITE=${SITE:-/etc/burst/site.yaml}
NODE=${SLURMD_NODENAME:-$(hostname -s)}
OURS='burst check:' # our reasons begin with it; a node with another reason stays drained

said=$(timeout -k 5 50 "$BURST" cluster check --site "$SITE" --nagios --timeout 40 2>/dev/null)
code=$?
finding=$(printf '%s' "${said%% | *}" | tr -d '"' | cut -c 1-200)
state=$(scontrol show node "$NODE" --oneliner)
reason=$(printf '%s\n' "$state" | sed -n 's/.* Reason=\([^[]*\).*/\1/p')

case $code in
0 | 1) # ok, or a warning
    case $reason in "$OURS"*) scontrol update NodeName="$NODE" State=RESUME ;; esac
    ;;
2) # a failure; a reason that the node already has is kept
    [ -n "$reason" ] || scontrol update NodeName="$NODE" State=DRAIN Reason="$OURS $finding"
    ;;
*) # no verdict: neither drain nor resume
    logger -t burst-check "the check gave no answer (status $code): $finding"
    ;;
esac

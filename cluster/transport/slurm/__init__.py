"""Commands on the nodes of a Slurm job as steps of that job, by `srun --overlap`: no SSH, no host keys."""

from __future__ import annotations

from cluster.transport.slurm.steps import connect_steps as connect_steps

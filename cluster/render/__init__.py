"""Reports in every form they are asked for: one module each."""

from cluster.render.table import why_not as why_not

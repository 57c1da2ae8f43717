"""Which models and settings tensor parallelism takes. Pure data: plans ask without torch."""

from __future__ import annotations

from engine.settings import TrialSettings


def tensor_parallel_unsupported_reason(settings: TrialSettings) -> str | None:
    """Why these settings cannot be divided among `tp_size` ranks, or None."""
    model, ranks = settings.model, settings.tp_size
    if ranks == 1:
        return None
    counts = {
        "query heads": model.heads,
        "KV heads": model.kv_heads,
        "columns of the MLP": model.ffn,
        "words of the vocabulary": model.vocab,
    }
    for label, count in counts.items():
        if count % ranks:
            return (
                f"{settings.method} divides {label} among tp_size {ranks} ranks, found {count} of model {model.name}; "
                f"choose a tp_size that divides {count}"
            )
    divisible = {
        "output_bias": False, "mlp_bias": False, "qk_norm_whole": False, "norms": "before", "window": 0, "sinks": False,
    }  # fmt: skip
    for name, of_llama in divisible.items():
        if getattr(model, name) != of_llama:
            return (
                f"{settings.method} cannot divide {name} {getattr(model, name)} of model {model.name} among tp_size "
                f"{ranks} ranks; choose a model without it, or a method with tp_size 1"
            )
    for name, found, alone in (
        ("mlp_tiles", settings.mlp_tiles, 1),
        ("projection_tiles", settings.projection_tiles, 1),
        ("head_tiles", settings.head_tiles, 0),
        ("loss_kernel", settings.loss_kernel, "own"),
        ("sharding", settings.sharding, "full"),
    ):
        if found != alone:
            return f"{settings.method} has no {name} {found}; set {name} to {alone}"
    return None

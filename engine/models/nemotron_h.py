"""Nemotron-H (arXiv:2504.03624): Mamba-2 in most layers, attention without RoPE in a few, MLPs without a gate.

A layer of its files is a half: Mamba-2, attention or an MLP, in the order of a pattern of M, * and -. Here an MLP
belongs to the layer before it, and a layer that no MLP follows has none.
"""

from __future__ import annotations

from collections.abc import Mapping

from engine.models.architecture import FULL, LINEAR, NO_STEP_LIMIT, Architecture, Config, shortest_pattern
from engine.shape import ModelShape

EXPERTS, MLP = "moe", "mlp"
KINDS = {"M": LINEAR, "*": FULL, "-": MLP, "E": EXPERTS}  # of letters of `hybrid_override_pattern`
DEFAULTS: Mapping[str, object] = {  # of the class, for keys that a file leaves out
    "num_key_value_heads": 8,
    "head_dim": 128,
    "layer_norm_epsilon": 1e-5,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
    "conv_kernel": 4,
    "time_step_min": 0.001,
}
RENAMED = {"mamba": LINEAR, "attention": FULL}  # kinds of `layers_block_type` in files of before 5.23


def read(config: Config) -> dict[str, object]:
    config = Config({**DEFAULTS, **config.content})
    kinds, head_dim = _kinds(config.content), config.whole("head_dim")
    config.expect("num_hidden_layers", None, len(kinds))
    config.expect("attention_head_dim", None, head_dim)  # of older files, without effect in the class
    letters = _letters(kinds)
    return {
        "layers": len(letters),
        "layer_pattern": shortest_pattern(letters),
        "kv_heads": config.whole("num_key_value_heads"),
        "head_dim": head_dim,
        "rope": False,
        "gated": False,
        "activation": "relu2",
        "mlp_bias": config.flag("mlp_bias"),
        "norm_eps": config.number("layer_norm_epsilon"),
        "linear": "mamba2",
        "linear_heads": config.whole("mamba_num_heads"),
        "linear_key_heads": config.whole("n_groups"),
        "linear_key_dim": config.whole("ssm_state_size"),
        "linear_value_dim": config.whole("mamba_head_dim"),
        "linear_conv": config.whole("conv_kernel"),
        # The class clamps with this, not with `time_step_limit`.
        "linear_step_min": config.number("time_step_min"),
    }


def _kinds(content: Mapping[str, object]) -> list[object]:
    """The kind of every half, by the names of release 5."""
    named, pattern = content.get("layers_block_type"), content.get("hybrid_override_pattern")
    listed: list[object] = [RENAMED.get(str(kind), kind) for kind in named] if isinstance(named, list) else []
    spelled: list[object] = [KINDS.get(letter, letter) for letter in pattern] if isinstance(pattern, str) else []
    kinds = listed or spelled
    if not kinds or (named is not None and listed != kinds) or (pattern is not None and spelled != kinds):
        raise ValueError(
            f"layers_block_type is {str(named)[:80]!r} and hybrid_override_pattern {str(pattern)[:80]!r}; expected "
            f"a list of {LINEAR}, {FULL} and {MLP}, or the same as a text of M, * and -"
        )
    return kinds


def _letters(kinds: list[object]) -> str:
    """`layer_pattern` of the halves, without repetition."""
    letters = ""
    for place, kind in enumerate(kinds):
        if kind == EXPERTS:
            raise ValueError(f"layer {place} has experts, which this model does not have; expected {MLP} in its place")
        if kind not in (LINEAR, FULL, MLP):
            raise ValueError(f"layer {place} is {str(kind)[:40]!r}; expected {LINEAR}, {FULL} or {MLP}")
        if kind != MLP:
            letters += "L" if kind == LINEAR else "F"
        elif letters[-1:].isupper():
            letters = letters[:-1] + letters[-1].lower()
        else:
            raise ValueError(
                f"layer {place} is an MLP, and the one before it is {'an MLP too' if letters else 'missing'}; expected "
                f"{LINEAR} or {FULL} before each MLP"
            )
    return letters


def write(shape: ModelShape) -> dict[str, object]:
    halves = (("M" if linear else "*") + "-" * mlp for linear, mlp in zip(shape.linear_layers, shape.mlps, strict=True))
    pattern = "".join(halves)
    return {
        "hybrid_override_pattern": pattern,
        "num_hidden_layers": len(pattern),
        "mlp_hidden_act": "relu2",
        "mlp_bias": shape.mlp_bias,
        "layer_norm_epsilon": shape.norm_eps,
        "mamba_num_heads": shape.linear_heads,
        "mamba_head_dim": shape.linear_value_dim,
        "n_groups": shape.linear_key_heads,
        "ssm_state_size": shape.linear_key_dim,
        "conv_kernel": shape.linear_conv,
        "time_step_min": shape.linear_step_min,
        "pad_token_id": None,
    }


ARCHITECTURE = Architecture(
    class_name="NemotronHForCausalLM",
    model_type="nemotron_h",
    read=read,
    write=write,
    neutral={
        "mlp_hidden_act": ("relu2",),
        "mamba_hidden_act": (None, "silu"),
        "use_conv_bias": (None, True),
        "time_step_limit": NO_STEP_LIMIT,
        "sliding_window": (None,),
        "num_nextn_predict_layers": (None, 0),
        # The class of the same name in transformers has taken the place of the code that came with these models.
        "auto_map": (
            None,
            {
                "AutoConfig": "configuration_nemotron_h.NemotronHConfig",
                "AutoModelForCausalLM": "modeling_nemotron_h.NemotronHForCausalLM",
            },
        ),
    }
    | dict.fromkeys(("attention_bias", "use_bias", "mamba_proj_bias", "residual_in_fp32"), (None, False))
    # Other names of keys above, which would replace these.
    | dict.fromkeys(
        ("layer_types", "mamba_n_groups", "mamba_d_conv", "mamba_dt_min", "mamba_dt_limit", "mamba_conv_bias"), (None,)
    ),
    names={
        "embedding": "backbone.embeddings",
        "norm": "backbone.norm_f",
        "attention_norm": "norm",
        "mixer_norm": "norm",
        "mlp_norm": "norm",
        "mlp.up": "mixer.up_proj",
        "mlp.down": "mixer.down_proj",
        "attention.q": "mixer.q_proj",
        "attention.k": "mixer.k_proj",
        "attention.v": "mixer.v_proj",
        "attention.output": "mixer.o_proj",
        "mixer.norm": "mixer.norm",
        "mixer.output": "mixer.out_proj",
        "mixer.conv": "mixer.conv1d",
        "mixer.decay_log": "mixer.A_log",
        "mixer.decay_bias": "mixer.dt_bias",
        "mixer.skip": "mixer.D",
    }
    | dict.fromkeys(("mixer.gate", "mixer.v", "mixer.k", "mixer.q", "mixer.decay"), "mixer.in_proj"),
    layers="backbone.layers",
    halves=True,
)

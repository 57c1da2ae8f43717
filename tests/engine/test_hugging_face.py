"""Models in Hugging Face's layout survive the round trip, and are else refused.

models/test_parity.py compares what they compute with transformers.
"""

from __future__ import annotations

import errno
import json
import resource
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import distribute_tensor, init_device_mesh

from engine.hf import INDEX, SINGLE, export_hugging_face, import_hugging_face, shards_of
from engine.initialise import initialise
from engine.models.decoder import Decoder
from engine.shape import ModelShape

# Heads whose width together is not `hidden`, three queries to a KV head, and neither default base nor epsilon.
SHAPE = {"layers": 3, "hidden": 48, "ffn": 56, "heads": 6, "kv_heads": 2, "head_dim": 16, "vocab": 61}
LLAMA = ModelShape(name="llama", rope_base=500_000.0, norm_eps=1e-4, **SHAPE)
QWEN3 = ModelShape(name="qwen3", rope_base=1_000_000.0, norm_eps=1e-3, architecture="qwen3", qk_norm=True, **SHAPE)
SHAPES = pytest.mark.parametrize("shape", [LLAMA, QWEN3], ids=lambda shape: shape.name)
SEVERAL = 20_000  # bytes per shard: a handful of files


FIRST = "model-00001-of-*.safetensors"


def decoder(shape: ModelShape, seed: int = 0) -> Decoder:
    """A model whose norms, too, have weights of their own: all ones would hide a norm that is left out or swapped."""
    with torch.device("meta"):
        model = Decoder(shape)
    initialise(model, seed, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(0.5 + torch.rand(parameter.shape, generator=generator))
    return model


def exported(shape: ModelShape, directory: Path, **options: Any) -> Path:
    return export_hugging_face(decoder(shape).state_dict(), shape, directory, **{"shard_bytes": SEVERAL} | options)


@SHAPES
def test_the_round_trip_is_exact(tmp_path: Path, shape: ModelShape) -> None:
    directory = exported(shape, tmp_path / shape.name, max_positions=4096)
    assert len(list(directory.glob("*.safetensors"))) > 2
    assert json.loads((directory / "config.json").read_text())["max_position_embeddings"] == 4096
    found_shape, tensors = import_hugging_face(directory)
    assert found_shape == shape
    given = decoder(shape).state_dict()
    found = list(tensors)
    assert [name for name, _ in found] == list(given)
    assert all(tensor.dtype == torch.float32 and torch.equal(tensor, given[name]) for name, tensor in found)


def test_an_export_in_bf16_is_the_rounded_model(tmp_path: Path) -> None:
    directory = exported(LLAMA, tmp_path / "out", dtype=torch.bfloat16)
    assert json.loads((directory / "config.json").read_text())["torch_dtype"] == "bfloat16"
    given = decoder(LLAMA).state_dict()
    assert all(torch.equal(tensor, given[name].bfloat16()) for name, tensor in import_hugging_face(directory)[1])


def test_a_tied_head_is_one_parameter_in_and_out(tmp_path: Path) -> None:
    shape = replace(QWEN3, tied=True)
    directory = exported(shape, tmp_path / "out")
    assert "lm_head.weight" not in json.loads((directory / INDEX).read_text())["weight_map"]
    found, tensors = import_hugging_face(directory)
    assert replace(found, name=shape.name) == shape
    assert "head.weight" not in dict(tensors)


def test_an_older_export_in_one_file_is_read_with_the_defaults_of_its_day(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    shape = ModelShape(name="old", layers=1, hidden=12, ffn=8, heads=3, kv_heads=3, head_dim=4, vocab=5, norm_eps=1e-6)
    directory = exported(shape, tmp_path / "old", shard_bytes=1 << 20)
    (whole,) = directory.glob("*.safetensors")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2)}
    save_file(load_file(whole) | frequencies, directory / SINGLE)
    whole.unlink()
    (directory / INDEX).unlink()
    change_config(directory, rope_theta=..., head_dim=..., num_key_value_heads=..., tie_word_embeddings=...)
    found, tensors = import_hugging_face(directory)
    assert found == shape
    assert dict(tensors).keys() == decoder(shape).state_dict().keys()


def test_one_file_counts_before_the_index_of_an_earlier_model_in_the_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = exported(QWEN3, tmp_path / "out")
    shards = [load_file(path) for path in directory.glob("*.safetensors")]
    save_file({name: 2 * tensor for shard in shards for name, tensor in shard.items()}, directory / SINGLE)
    earlier = dict(import_hugging_face(exported(QWEN3, tmp_path / "earlier"))[1])
    later = dict(import_hugging_face(directory)[1])
    assert later.keys() == earlier.keys()
    assert all(torch.equal(later[name], 2 * tensor) for name, tensor in earlier.items())


def test_a_folder_is_looked_at_without_torch_and_without_reading_a_tensor(tmp_path: Path) -> None:
    directory = exported(LLAMA, tmp_path / "llama")
    look = f"from pathlib import Path; import engine.hf; print(engine.hf.hugging_face_shape(Path({str(directory)!r})))"
    code = f"import sys; {look}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{LLAMA}\nFalse\n"


def test_an_export_keeps_what_its_origin_says_beside_the_function(tmp_path: Path) -> None:
    origin = exported(LLAMA, tmp_path / "origin", max_positions=4096)
    ids = {"bos_token_id": 1, "eos_token_id": [2, 3], "pad_token_id": None}
    change_config(origin, **ids, attention_dropout=0.0)
    (origin / "generation_config.json").write_text('{"temperature": 0.6}\n')
    for trained, longest in ((512, 4096), (8192, 8192)):
        directory = exported(LLAMA, tmp_path / str(trained), max_positions=trained, origin=origin)
        config = json.loads((directory / "config.json").read_text())
        assert {key: config[key] for key in ids} == ids
        assert config["max_position_embeddings"] == longest
        assert (directory / "generation_config.json").read_bytes() == (origin / "generation_config.json").read_bytes()

    yarn = replace(LLAMA, rope_scaling="yarn:factor=4,original=1024")
    directory = exported(yarn, tmp_path / "yarn", max_positions=8192, origin=origin)
    assert json.loads((directory / "config.json").read_text())["max_position_embeddings"] == 4096


def test_shards_stay_below_their_size_and_hold_every_tensor_once() -> None:
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 10, "f": 1}
    assert shards_of(sizes, 10) == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]


def test_the_index_lists_every_tensor_in_its_file(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    directory = exported(QWEN3, tmp_path / "out")
    index = json.loads((directory / INDEX).read_text())
    files = {path.name: load_file(path) for path in directory.glob("*.safetensors")}
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    held = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in files.values()]
    assert sum(held) == index["metadata"]["total_size"] == 4 * QWEN3.parameters
    assert max(held) <= SEVERAL
    assert sorted(files) == [f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)]
    assert len({path.stat().st_mode for path in directory.iterdir()}) == 1  # readable by the same people


def test_a_shard_is_written_before_the_next_one_is_asked_for(tmp_path: Path) -> None:
    written: list[int] = []

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for pair in decoder(LLAMA).state_dict().items():
            written.append(len(list(tmp_path.glob(".out.*.part/*.safetensors"))))
            yield pair

    directory = export_hugging_face(tensors(), LLAMA, tmp_path / "out", shard_bytes=SEVERAL)
    assert written[-1] == len(list(directory.glob("*.safetensors"))) - 1 > 1


def test_parameters_may_be_given_in_any_order(tmp_path: Path) -> None:
    given = decoder(LLAMA).state_dict()
    directory = export_hugging_face(reversed(given.items()), LLAMA, tmp_path / "out", shard_bytes=SEVERAL)
    assert all(torch.equal(tensor, given[name]) for name, tensor in import_hugging_face(directory)[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm.weight": None}, r"lacks 1 parameters, norm.weight among them; pass the whole model"),
        ({"bias": torch.zeros(1)}, r"bias is no parameter of this shape"),
        ({"norm.weight": torch.zeros(49)}, r"norm.weight has size \[49\]; the shape makes it \[48\]"),
    ],
)
def test_a_state_of_another_model_is_refused_and_leaves_nothing(
    tmp_path: Path, change: dict[str, Tensor | None], message: str
) -> None:
    state = {name: tensor for name, tensor in (decoder(LLAMA).state_dict() | change).items() if tensor is not None}
    with pytest.raises(ValueError, match=message):
        export_hugging_face(state, LLAMA, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_parameter_given_twice_is_refused(tmp_path: Path) -> None:
    pairs = list(decoder(LLAMA).state_dict().items())
    with pytest.raises(ValueError, match=r"embedding.weight is given twice"):
        export_hugging_face([*pairs, pairs[0]], LLAMA, tmp_path / "out")


def test_a_sharded_parameter_is_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = decoder(LLAMA).state_dict()
        state["norm.weight"] = distribute_tensor(state["norm.weight"], init_device_mesh("cpu", (1,)))
        with pytest.raises(ValueError, match=r"norm.weight is sharded over ranks; pass its full_tensor"):
            export_hugging_face(state, LLAMA, tmp_path / "out")
    finally:
        dist.destroy_process_group()


def test_a_plain_mlp_cannot_be_exported(tmp_path: Path) -> None:
    shape = ModelShape(name="7b_artifact", gated=False, **SHAPE)
    with pytest.raises(ValueError, match="model 7b_artifact has gated False, and LlamaForCausalLM has gated True"):
        exported(shape, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_width_that_transformers_llama_refuses_is_not_exported(tmp_path: Path) -> None:
    odd = SHAPE | {"hidden": 40}
    with pytest.raises(ValueError, match=r"hidden 40 is not divisible by 6 heads, which LlamaForCausalLM requires"):
        exported(ModelShape(name="odd", **odd), tmp_path / "llama")
    qwen3 = ModelShape(name="qwen3", architecture="qwen3", qk_norm=True, **odd)
    assert import_hugging_face(exported(qwen3, tmp_path / "qwen3"))[0] == qwen3


def test_a_folder_in_use_is_left_alone_and_an_empty_one_taken(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    directory.mkdir()
    exported(LLAMA, directory)
    before = {path: path.read_bytes() for path in directory.iterdir()}
    with pytest.raises(ValueError, match="out exists already; give a new folder"):
        exported(QWEN3, directory)
    assert {path: path.read_bytes() for path in directory.iterdir()} == before


def test_a_disk_without_room_is_an_os_error_and_leaves_nothing(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # of any one file
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            exported(LLAMA, tmp_path / "out")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert caught.value.errno == errno.EFBIG
    assert Path(caught.value.filename).suffix == ".safetensors"
    assert list(tmp_path.iterdir()) == []


def test_a_missing_library_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = exported(LLAMA, tmp_path / "out")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (lambda: exported(LLAMA, tmp_path / "other"), lambda: import_hugging_face(directory)):
        with pytest.raises(ValueError, match=r"install it with: pip install 'burst-harness\[train\]'"):
            call()


def change_config(directory: Path, **changes: Any) -> None:
    """Set keys of a folder's config.json; `...` removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}), encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["BloomForCausalLM"]},
            r"architectures is \['BloomForCausalLM'\]; expected .* Llama",
        ),
        ({"architectures": ...}, "architectures is None; expected"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope_type is 'su'"),
        ({"rope_scaling": "default"}, "rope_scaling is 'default'; expected a dictionary"),
        ({"rope_parameters": {"rope_theta": 10000}}, r"rope_theta is given as \[10000.0, 500000.0\]; keep the one"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, which this model does not have; expected 1"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, and nothing is dropped in training here; set it to 0"),
        ({"resid_pdrop": 0.5}, "resid_pdrop is 0.5, and nothing is dropped in training here; set it to 0"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', which this model does not have; expected False or True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', which this model does not have; expected 'silu'"),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*; expected 3 of full_attention"),
        ({"layer_types": ["full_attention", "sliding_attention"] * 2}, "layer_types is .*; expected 3 of"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types has sliding_attention, but no window is in use"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is .*; expected missing"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map is"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
        ({"num_hidden_layers": ...}, "num_hidden_layers is missing; expected a whole number"),
        ({"hidden_size": 48.0}, "hidden_size is 48.0; expected a whole number"),
        ({"hidden_size": True}, "hidden_size is True; expected a whole number"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; expected a number"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf; expected a number"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000.*; expected a number"),
        ({"head_dim": ..., "hidden_size": 50}, "hidden_size 50 does not split into 6 heads; add head_dim"),
        ({"num_key_value_heads": 4}, "6 query heads are not divisible by 4 KV heads"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; expected a whole number from 1"),
    ],
)
def test_a_configuration_this_model_cannot_compute_is_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = exported(LLAMA, tmp_path / "out")
    change_config(directory, **changes)
    with pytest.raises(ValueError, match=f"out/config.json: .*{message}"):
        import_hugging_face(directory)


@pytest.mark.parametrize(
    "changes",
    [
        {"use_sliding_window": False},
        {"attention_dropout": 0.0, "embd_pdrop": 0, "hidden_dropout": None},
        {"layer_types": ["full_attention"] * 3},
        {"rope_theta": ..., "rope_parameters": {"rope_type": "default", "rope_theta": 500_000}},  # release 5
        {"rope_scaling": {"type": "default"}},
        {"tie_word_embeddings": ...},
    ],
)
def test_an_equivalent_configuration_is_read(tmp_path: Path, changes: dict[str, Any]) -> None:
    directory = exported(LLAMA, tmp_path / "llama")
    change_config(directory, **changes)
    assert import_hugging_face(directory)[0] == LLAMA


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 4}, "lacks model.layers.3.input_layernorm.weight, .* and 6 more; fetch the missing"),
        ({"num_hidden_layers": 2}, "holds model.layers.2.input_layernorm.weight, .* which this model has no place"),
        ({"num_hidden_layers": 1 << 16}, "has 30 tensors, too few for 65536 layers"),
        (
            {"num_attention_heads": 1 << 28, "head_dim": 1 << 28},
            r"q_proj.weight has size \[96, 48\], but config.json makes it \[72057594037927936, 48\]",
        ),
        ({"vocab_size": 64}, r"embed_tokens.weight has size \[61, 48\], but config.json makes it \[64, 48\]"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "lacks model.layers.0.self_attn.k_norm.weight"),
    ],
)
def test_tensors_that_do_not_fit_the_configuration_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    directory = exported(LLAMA, tmp_path / "out")
    change_config(directory, **changes)
    with pytest.raises(ValueError, match=f"out: .*{message}"):
        import_hugging_face(directory)


def test_a_quantized_tensor_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = exported(LLAMA, tmp_path / "out")
    (file,) = directory.glob(FIRST)
    save_file({name: tensor.to(torch.int8) for name, tensor in load_file(file).items()}, file)
    with pytest.raises(ValueError, match=r"embed_tokens.weight is saved as I8; expected one of F64, F32, F16, BF16"):
        import_hugging_face(directory)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _point_outside(path: Path) -> None:
    path.write_text(json.dumps({"weight_map": {"lm_head.weight": "../secret.safetensors"}}))


def _swap_files(path: Path) -> None:
    index = json.loads(path.read_text())
    names = sorted(set(index["weight_map"].values()))
    following = dict(zip(names, [*names[1:], names[0]], strict=True))
    path.write_text(json.dumps({"weight_map": {name: following[file] for name, file in index["weight_map"].items()}}))


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("config.json", Path.unlink, r"config.json: cannot be read \(No such file or directory\)"),
        ("config.json", lambda path: path.write_text("{"), r"config.json: not readable as JSON"),
        ("config.json", lambda path: path.write_text("[]"), r"config.json: holds no JSON object"),
        ("config.json", lambda path: path.write_bytes(b"\xff"), r"config.json: not readable as JSON"),
        (
            "config.json",
            lambda path: path.write_text('{"a": ' + "9" * 5000 + "}"),
            r"config.json: not readable as JSON",
        ),
        (INDEX, Path.unlink, r"holds neither model.safetensors.index.json nor model.safetensors; .* never read"),
        (INDEX, lambda path: path.write_text("{}"), r"index.json: has no weight_map; fetch the file again"),
        (INDEX, _point_outside, r"index.json: names '../secret.safetensors'; expected files of this folder"),
        (INDEX, _swap_files, r"lacks .*, which model.safetensors.index.json lists"),
        (FIRST, Path.unlink, r"00001-of-\d+.safetensors: not readable as safetensors .* fetch the file again"),
        (FIRST, _cut, r"00001-of-\d+.safetensors: not readable as safetensors"),
        (FIRST, lambda path: path.write_text("version https://git-lfs.github.com/spec/v1"), r"not readable as safe"),
    ],
)
def test_a_damaged_folder_is_one_sentence(tmp_path: Path, file: str, damage: Any, message: str) -> None:
    directory = exported(LLAMA, tmp_path / "out")
    (path,) = directory.glob(file)
    damage(path)
    with pytest.raises(ValueError, match=message) as error:
        import_hugging_face(directory)
    assert "\n" not in str(error.value)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    directory = exported(LLAMA, tmp_path / "out")
    for path in directory.glob("model*"):
        path.unlink()
    torch.save(decoder(LLAMA).state_dict(), directory / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled weights such as pytorch_model.bin are never read"):
        import_hugging_face(directory)

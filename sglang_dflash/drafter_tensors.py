"""The tensors a DFlash drafter must hold, checked from the safetensors headers alone.

Upstream's loader (``models/dflash.py`` DFlashDraftModel.load_weights) skips names it does not know and never
asks which parameters stayed at their random start; only fc's shape raises. Here names, shapes and dtypes all
must match.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from sglang_dflash.drafter_config import CHAIN_REMEDY, DrafterError, DrafterSpec, read_json, refuse

INDEX = "model.safetensors.index.json"
_FLOATS = ("BF16", "F16", "F32")
# The names load_weights takes for these two besides the plain ones.
_ALIASES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}
_FUSED = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
_BORROWED = ("embed_tokens.", "lm_head.")
_OTHER_HEADS = ("prefix_gru.", "embed_proj.", "candidate_selector.", "lilicorr.", "markov")


@dataclass(frozen=True)
class TensorHeader:
    """One tensor as its file declares it; ``name`` is the name in the file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def expected_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of a drafter: 11 a layer and 3, more with biases. A matrix is torch's
    [out_features, in_features]."""
    h, m, d = spec.hidden_size, spec.intermediate_size, spec.head_dim
    q, kv = spec.num_heads * d, spec.num_kv_heads * d
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (q, h),
        "self_attn.k_proj.weight": (kv, h),
        "self_attn.v_proj.weight": (kv, h),
        "self_attn.o_proj.weight": (h, q),
        "self_attn.q_norm.weight": (d,),
        "self_attn.k_norm.weight": (d,),
        "mlp.gate_proj.weight": (m, h),
        "mlp.up_proj.weight": (m, h),
        "mlp.down_proj.weight": (h, m),
        "input_layernorm.weight": (h,),
        "post_attention_layernorm.weight": (h,),
    }
    if spec.attention_bias:
        layer |= {f"self_attn.{p}_proj.bias": (n,) for p, n in (("q", q), ("k", kv), ("v", kv), ("o", h))}
    if spec.attention_sink_bias:
        layer["self_attn.attention_sink_bias"] = (spec.num_heads,)
    shapes = {f"layers.{i}.{k}": shape for i in range(spec.num_layers) for k, shape in layer.items()}
    fc = (h, len(spec.target_layer_ids) * h)
    return {"fc.weight": fc, "hidden_norm.weight": (h,), "norm.weight": (h,), **shapes}


def check_tensors(spec: DrafterSpec) -> None:
    """Check every tensor under ``spec.path`` against ``spec``, by the headers alone. Raises DrafterError."""
    root = Path(spec.path)
    headers = read_headers(root)
    for t in headers.values():
        if t.dtype not in _FLOATS:
            remedy = "use the bf16 drafter: quantised ones load and then accept about nothing"
            raise refuse(t.file, t.name, f"dtype {t.dtype}", " or ".join(_FLOATS), remedy)
    wanted = _with_fused(expected_shapes(spec), headers)
    config = root / "config.json"
    if extra := [t for name, t in headers.items() if name not in wanted]:
        raise _unexpected(extra[0], len(extra))
    if missing := [name for name in wanted if name not in headers]:
        # The file that holds the rest is the one to repair.
        file = next((t.file for t in headers.values()), root)
        found = f"no such tensor ({len(missing)} missing, {len(headers)} present)"
        shape = f"shape {list(wanted[missing[0]])}"
        raise refuse(file, missing[0], found, shape, f"save the whole drafter: {config} asks for it")
    for name, t in headers.items():
        if t.shape == wanted[name]:
            continue
        if name == "fc.weight":
            raise _fc_mismatch(spec, t)
        found, want = f"shape {list(t.shape)}", f"{list(wanted[name])}"
        raise refuse(t.file, t.name, found, want, f"{config} and the tensors must come from one checkpoint")


def read_headers(root: Path) -> dict[str, TensorHeader]:
    """Every tensor's header by canonical name, from the files upstream would load: those of the index if
    there is one, else every ``*.safetensors``. Raises DrafterError for pickles, missing or damaged files and
    duplicates."""
    index = root / INDEX
    where = _weight_map(index) if index.exists() else None
    names = sorted(set(where.values())) if where is not None else sorted(p.name for p in root.glob("*.safetensors"))
    if not names:
        pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in root.glob(pattern))
        found = f"only {', '.join(pickles)} (pickle, never loaded)" if pickles else "none"
        raise refuse(root, "*.safetensors", found, "the drafter's weights", "convert or download model.safetensors")
    headers: dict[str, TensorHeader] = {}
    for t in (t for name in names for t in _file_headers(root / name)):
        name = _ALIASES.get(t.name, t.name.removeprefix("model."))
        if first := headers.get(name):
            found = f"it also as {first.name} in {first.file.name}"
            raise refuse(t.file, t.name, found, "each tensor once", "delete the stale file or copy")
        headers[name] = t
    if where is not None:
        held = {t.name: t.file.name for t in headers.values()}
        for name, shard in where.items():
            if held.get(name) != shard:
                found = f"it in {held.get(name, 'no shard')}"
                raise refuse(index, name, found, f"it in {shard}", "download the index and its shards again")
    return headers


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index, "download the index again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise refuse(index, "weight_map", type(weight_map).__name__, "tensor names to files", "download it again")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not (index.parent / shard).is_file():
            found = f"{shard}, which is not in {index.parent}"
            raise refuse(index, name, found, "a file beside the index", "finish the download")
    return weight_map


def _file_headers(file: Path) -> Iterable[TensorHeader]:
    try:
        opened: Any
        # The file is mapped, and a slice handle reads no weights.
        with safe_open(str(file), framework="numpy") as opened:
            for name in opened.keys():  # noqa: SIM118
                part = opened.get_slice(name)
                yield TensorHeader(file, name, tuple(part.get_shape()), str(part.get_dtype()))
    except (SafetensorError, OSError) as e:
        raise refuse(file, "header", f"a damaged file ({e})", "a complete safetensors file", "download it again") from e


def _with_fused(shapes: dict[str, tuple[int, ...]], present: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """``shapes`` with q/k/v or gate/up replaced by the fused tensor where the checkpoint holds that one."""
    shapes = dict(shapes)
    for name in present:
        for fused, parts in _FUSED.items():
            if f".{fused}." not in name:
                continue
            split = [name.replace(fused, f"{fused.split('.')[0]}.{part}") for part in parts]
            if all(part in shapes for part in split):
                found = [shapes.pop(part) for part in split]
                shapes[name] = (sum(shape[0] for shape in found), *found[0][1:])
    return shapes


def _unexpected(t: TensorHeader, count: int) -> DrafterError:
    bare = t.name.removeprefix("model.")
    if bare.startswith(_BORROWED):
        remedy = "delete it: the target's embeddings and head are used, whatever this one says"
    elif bare.startswith(_OTHER_HEADS) or "_conv." in bare:
        remedy = CHAIN_REMEDY
    else:
        remedy = "it would be skipped in silence: config.json and the tensors must come from one checkpoint"
    return refuse(
        t.file, t.name, f"an unknown tensor of shape {list(t.shape)} ({count} such)", "no such tensor", remedy
    )


def _fc_mismatch(spec: DrafterSpec, t: TensorHeader) -> DrafterError:
    hidden, k = spec.hidden_size, len(spec.target_layer_ids)
    found = f"fc {t.shape[-1] if t.shape else 0} wide, shape {list(t.shape)}"
    wanted = f"{k * hidden} wide, shape {[hidden, k * hidden]} ({k} target_layer_ids x hidden_size {hidden})"
    remedy = "config.json and the tensors must come from one checkpoint"
    if len(t.shape) == 2 and t.shape[1] % hidden == 0:
        n = t.shape[1] // hidden
        remedy = f"the tensor fits {n} target_layer_ids, config.json lists {k}: restore the trained ids"
        if n == k - 1:
            remedy += " (one layer was dropped in training: fc takes all of them)"
        elif n == k + 1:
            remedy += " (one more was trained in: the final hidden state is no context feature)"
    return refuse(t.file, t.name, found, wanted, remedy)

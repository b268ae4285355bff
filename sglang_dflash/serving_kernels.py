"""Which linear-attention and convolution kernels SGLang serves with, read from its source.

SGLang chooses most of them where its modules bind names at import, under `if is_cuda(): ... elif is_cpu():
...`. Reading those branches answers for any platform, without importing a module that needs the hardware.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

GDN_KERNEL = "srt.layers.attention.linear.kernels.gdn_triton"
GDN_BACKEND = "srt.layers.attention.linear.gdn_backend"
CONV = "srt.layers.attention.mamba.causal_conv1d"

#: Folders whose imports decide what a hybrid model runs.
_SERVING = ("srt/layers/attention", "srt/models", "kernels/ops/attention", "kernels/ops/mamba")


@dataclass(frozen=True)
class ServingKernel:
    """One operation of a hybrid model and the function that runs it."""

    operation: str
    path: str  # module:name, or the problem in words when `found` is False
    note: str
    found: bool = True


class NotResolved(LookupError):
    """SGLang's source does not say where a name comes from."""


def _truth(test: ast.expr, platform: str, flags: dict[str, bool]) -> bool | None:
    """The value of an import-time condition on `platform` ("cuda" or "cpu"); None if it is something else."""
    match test:
        case ast.Call(func=ast.Name(id=name)) if name.startswith("is_"):
            return name in (f"is_{platform}", f"is_{platform}_alike")
        case ast.Name(id="TYPE_CHECKING"):
            return False
        case ast.Name(id=name):
            return flags.get(name)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            value = _truth(operand, platform, flags)
            return None if value is None else not value
        case ast.BoolOp(op=op, values=values):
            known = [_truth(value, platform, flags) for value in values]
            if None in known:
                return None
            return any(known) if isinstance(op, ast.Or) else all(known)
    return None


def _dotted(node: ast.expr) -> str | None:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            base = _dotted(value)
            return None if base is None else f"{base}.{attr}"
    return None


def _bindings(module: str, body: list[ast.stmt], platform: str) -> dict[str, str]:
    """What every module-level name is bound to at the end of its import: `module:name`."""
    bound: dict[str, str] = {}
    flags: dict[str, bool] = {}

    def walk(statements: list[ast.stmt]) -> None:
        for statement in statements:
            match statement:
                case ast.ImportFrom(module=str(source), names=names, level=0):
                    bound.update({alias.asname or alias.name: f"{source}:{alias.name}" for alias in names})
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    bound[name] = f"{module}:{name}"
                case ast.If(test=test):
                    value = _truth(test, platform, flags)
                    if value is not None:
                        walk(statement.body if value else statement.orelse)
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    if (flag := _truth(value, platform, flags)) is not None:
                        flags[name] = flag
                    elif dotted := _dotted(value):
                        path, _, last = dotted.rpartition(".")
                        bound[name] = bound.get(dotted, f"{path}:{last}")
                case ast.Try():
                    walk(statement.body)

    walk(body)
    return bound


def resolve(root: Path, module: str, name: str, platform: str) -> str:
    """Where `name` in SGLang's `module` (dotted, below the package) comes from: `module:name`.

    Follows imports through SGLang's own modules and stops at a definition or at another package. Raises
    NotResolved.
    """
    base = root.joinpath(*module.split("."))
    file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
    if file is None:
        raise NotResolved(f"sglang.{module}: module not found")
    target = _bindings(f"sglang.{module}", ast.parse(file.read_text()).body, platform).get(name)
    if target is None:
        raise NotResolved(f"sglang.{module}.{name}: not bound on {platform}")
    source, _, original = target.partition(":")
    if source.startswith("sglang.") and source != f"sglang.{module}":
        return resolve(root, source.removeprefix("sglang."), original, platform)
    return target


def importers(root: Path, package: str) -> list[str]:
    """Modules of SGLang's serving path that import `package`: dotted, sorted, at most the first three."""
    line = re.compile(rf"^\s*(?:from|import)\s+{re.escape(package)}\b", re.MULTILINE)
    users = [
        file.relative_to(root).with_suffix("")
        for folder in _SERVING
        for file in sorted((root / folder).rglob("*.py"))
        if line.search(file.read_text(errors="replace"))
    ]
    return ["sglang." + ".".join(user.parts) for user in users[:3]]


def serving_kernels(root: Path, platform: str) -> list[ServingKernel]:
    """The kernels of a gated-delta-net target such as Qwen3.5/3.6; `platform` is "cuda" or "cpu"."""
    verify = "gated delta rule, verify (tree)", GDN_KERNEL, "fused_sigmoid_gating_delta_rule_update"
    prefill = "gated delta rule, prefill", GDN_KERNEL, "chunk_gated_delta_rule"
    conv_verify = "causal conv1d, verify (tree)", GDN_BACKEND, "causal_conv1d_update"
    wanted: tuple[tuple[str, str, str, str], ...]
    if platform == "cuda":
        wanted = (
            (*verify, "Triton; the only one that follows a tree's links"),
            (
                *prefill,
                "Triton, SGLang's copy of fla's; on sm90 and sm100 FlashInfer's instead where it fits "
                "(gdn_backend.flashinfer_gdn_prefill_default: heads of 128, fp32 states on sm90)",
            ),
            (
                "gated delta rule, decode",
                GDN_KERNEL,
                "fused_recurrent_gated_delta_rule_packed_decode",
                "Triton",
            ),
            (*conv_verify, "Triton"),
            (
                "causal conv1d, prefill",
                CONV,
                "_causal_conv1d_fn_triton",
                "Triton; the compiled kernel wants contiguous input, and prefill passes a transposed view",
            ),
        )
    else:
        note = "this package's torch code"
        wanted = (
            (*verify, note),
            (*prefill, note),
            (*conv_verify, note),
            ("causal conv1d, prefill", GDN_BACKEND, "causal_conv1d_fn", note),
        )
    return [_kernel(root, platform, *row) for row in wanted]


def _kernel(root: Path, platform: str, operation: str, module: str, name: str, note: str) -> ServingKernel:
    try:
        path = resolve(root, module, name, platform)
        if path.startswith(("sgl_kernel", "torch.ops.sgl_kernel")):
            path = _stand_in(path)
    except NotResolved as error:
        return ServingKernel(operation, str(error), note, found=False)
    return ServingKernel(operation, path, note)


def _stand_in(path: str) -> str:
    """The function that CPU mode publishes under a path of `sgl_kernel`."""
    from sglang_dflash.cpu import stand_in

    module, _, name = path.partition(":")
    functions = stand_in._TORCH_OPS if module.startswith("torch.") else stand_in._MODULES.get(module, ())
    for function in functions:
        if function.__name__ == name:
            return f"{function.__module__}:{name}"
    raise NotResolved(f"{path}: not among the functions that CPU mode provides")

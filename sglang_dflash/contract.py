"""What this plugin relies on in SGLang, checked before it serves anything.

The check parses SGLang's source files instead of importing them: it costs a fraction of a second in
every process that loads plugins, has no side effects, and can be pointed at any copy of the package.
"""

from __future__ import annotations

import ast
import gc
import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from sglang_dflash.contract_needs import NEEDS as SERVING_NEEDS
from sglang_dflash.contract_needs import Need
from sglang_dflash.contract_needs_capture import CAPTURE_NEEDS

__all__ = ["NEEDS", "SGLANG_VERSION", "Drift", "Need", "check", "installed_version", "sglang_root"]

_Node = ast.stmt | ast.Attribute  # a definition, or the target of ``self.name = ...``

SGLANG_VERSION = "0.5.23"
NEEDS: tuple[Need, ...] = (*SERVING_NEEDS, *CAPTURE_NEEDS)


@dataclass(frozen=True)
class Drift:
    """A need that this SGLang does not meet."""

    need: Need
    found: str

    def __str__(self) -> str:
        return f"sglang.{self.need.path.replace(':', '.')}: {self.found}"


def sglang_root() -> Path:
    """Folder of the installed sglang package, without importing it."""
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("sglang is not installed, want sglang==" + SGLANG_VERSION)
    return Path(next(iter(spec.submodule_search_locations)))


class _Source:
    """One module of SGLang, parsed a definition at a time: whole modules would cost every process a second."""

    def __init__(self, root: Path, dotted: str):
        base = root.joinpath(*dotted.split("."))
        file = next((f for f in (base.with_suffix(".py"), base / "__init__.py") if f.is_file()), None)
        self.text = None if file is None else file.read_text()
        self._found: dict[str, ast.stmt | None] = {}
        self._assigned: dict[str, dict[str, _Node]] = {}

    def find(self, name: str) -> ast.stmt | None:
        """The module-level definition of ``name``."""
        if name not in self._found:
            self._found[name] = self._alone(name) or _find(ast.parse(self.text or "").body, name)
        return self._found[name]

    def _alone(self, name: str) -> ast.stmt | None:
        """A definition at column zero, cut out; None where that does not work and the module must be parsed."""
        assert self.text is not None
        start = re.search(rf"^(?:(?:async )?def |class )?{name}\b(?=\s*[(:=])", self.text, re.MULTILINE)
        if start is None:
            return None
        end = re.compile(r"^[^\s#)\]]", re.MULTILINE).search(self.text, start.end())
        try:
            return _find(ast.parse(self.text[start.start() : end.start() if end else None]).body, name)
        except SyntaxError:
            return None

    def member(self, owner: _Node, name: str) -> _Node | None:
        """``name`` in the class ``owner``, in what its methods assign to ``self``, or in a base of the same file."""
        if not isinstance(owner, ast.ClassDef):
            return None
        if (defined := _find(owner.body, name)) is not None:
            return defined
        if owner.name not in self._assigned:
            self._assigned[owner.name] = {n.attr: n for n in ast.walk(owner) if _assigns_to_self(n)}
        if name in self._assigned[owner.name]:
            return self._assigned[owner.name][name]
        bases = (self.find(base.id) for base in owner.bases if isinstance(base, ast.Name))
        return next((node for base in bases if base and (node := self.member(base, name))), None)


def _assigns_to_self(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )


def _scope(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of one scope, those under its conditions included; not what functions or classes hold."""
    for node in body:
        yield node
        for name in ("body", "handlers", "orelse", "finalbody"):
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield from _scope(getattr(node, name, []))


def _find(body: list[ast.stmt], name: str) -> ast.stmt | None:
    for node in _scope(body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            return node
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == name:
            return node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return node
    return None


def _accepted(node: _Node) -> tuple[set[str], bool]:
    """Parameter or field names of a definition, and whether it takes any others."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
        a = node.args
        return {arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)}, a.kwarg is not None
    if isinstance(node, ast.ClassDef):
        fields = {s.target.id for s in node.body if isinstance(s, ast.AnnAssign) and isinstance(s.target, ast.Name)}
        return fields, False
    return set(), True


def _check_one(source: _Source, need: Need) -> Drift | None:
    module, _, qualname = need.path.partition(":")
    if source.text is None:
        return Drift(need, f"module sglang.{module} not found")
    first, *members = qualname.split(".")
    node: _Node | None = source.find(first)
    if node is None:
        return Drift(need, f"{first} not found")
    for part in members:
        node = source.member(node, part)
        if node is None:
            return Drift(need, f"{part} not found")
    names, open_ended = _accepted(node)
    missing = [p for p in need.params if p not in names]
    if missing and not open_ended:
        return Drift(need, f"parameters {', '.join(missing)} not found, has {', '.join(sorted(names))}")
    return None


def installed_version() -> str | None:
    """The installed SGLang's version, None when its metadata is missing."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return None


def check(root: Path | None = None) -> list[Drift]:
    """Every need that the SGLang below ``root`` does not meet; the default is the installed one, version included."""
    drifts = []
    if root is None and (version := installed_version()) != SGLANG_VERSION:
        need = Need("version", (), "the release this plugin was written against")
        drifts.append(Drift(need, f"found {version}, want {SGLANG_VERSION}"))
    root = root or sglang_root()
    collecting = gc.isenabled()
    gc.disable()  # syntax trees are many objects without garbage: half the time would go into looking for it
    try:
        sources = {module: _Source(root, module) for module in {need.path.partition(":")[0] for need in NEEDS}}
        found = [_check_one(sources[need.path.partition(":")[0]], need) for need in NEEDS]
    finally:
        if collecting:
            gc.enable()
    return drifts + [drift for drift in found if drift is not None]

"""The contract: this SGLang meets it, and any renamed name or dropped parameter is noticed and named."""

from __future__ import annotations

import ast
import gc
import inspect
import re
from functools import cache
from pathlib import Path

import pytest

from sglang_dflash import args, contract, plugin
from sglang_dflash.contract import NEEDS, Drift, Need, check, sglang_root

ROOT = sglang_root()


def target_of(need: Need) -> str:
    """The dotted path a hook would name."""
    return "sglang." + need.path.replace(":", ".")


def source_of(need: Need) -> Path:
    base = ROOT.joinpath(*need.path.partition(":")[0].split("."))
    return base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"


def test_the_installed_sglang_meets_every_need() -> None:
    assert check() == []
    assert len({need.path for need in NEEDS}) == len(NEEDS)


def one_file(tmp_path: Path, need: Need, text: str) -> Path:
    copy = tmp_path / source_of(need).relative_to(ROOT)
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(text)
    return tmp_path


def drifts_of(need: Need, root: Path) -> list[Drift]:
    return [drift for drift in check(root) if drift.need is need]


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def names_defined(tree: ast.Module, name: str) -> list[tuple[int, int]]:
    """Line and column (both from 0, in bytes) where ``name`` is defined, assigned, or assigned to ``self``."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and node.name == name:
            keyword = {ast.FunctionDef: "def ", ast.AsyncFunctionDef: "async def ", ast.ClassDef: "class "}[type(node)]
            found.append((node.lineno - 1, node.col_offset + len(keyword)))
        elif isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Store):
            found.append((node.lineno - 1, node.col_offset))
        elif isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store):
            found.append((node.end_lineno - 1, node.end_col_offset - len(name)))
    return found


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.path)
def test_a_renamed_name_is_a_drift(need: Need, tmp_path: Path) -> None:
    """Only the definition is renamed: what still uses the old name must not pass for it."""
    name = need.path.rpartition(":")[2].rpartition(".")[2]
    places = names_defined(parsed(source_of(need)), name)
    assert places
    lines = source_of(need).read_bytes().splitlines(keepends=True)
    for row, column in sorted(places, reverse=True):
        line = lines[row]
        assert line[column:].startswith(name.encode())
        lines[row] = line[:column] + name.encode() + b"_of_old" + line[column + len(name) :]
    renamed = b"".join(lines).decode()
    (drift,) = drifts_of(need, one_file(tmp_path, need, renamed))
    assert drift.found == f"{name} not found"
    assert str(drift) == f"{target_of(need)}: {name} not found"


OPEN_ENDED = "srt.arg_groups.overrides:declare_resolution"  # takes any keyword


@pytest.mark.parametrize(
    "need", [need for need in NEEDS if need.params and need.path != OPEN_ENDED], ids=lambda need: need.path
)
def test_a_dropped_parameter_is_a_drift(need: Need, tmp_path: Path) -> None:
    """Every parameter of the definition gets another name."""
    tree = ast.parse(source_of(need).read_text())

    class Rename(ast.NodeTransformer):
        def visit_arg(self, node: ast.arg) -> ast.arg:
            return ast.arg(arg=node.arg + "_of_old", annotation=node.annotation)

        def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AnnAssign:
            if isinstance(node.target, ast.Name):
                node.target = ast.Name(node.target.id + "_of_old", ast.Store())
            return node

    renamed = ast.unparse(ast.fix_missing_locations(Rename().visit(tree)))
    (drift,) = drifts_of(need, one_file(tmp_path, need, renamed))
    for parameter in need.params:
        assert parameter in drift.found.partition(", has ")[0]


def test_a_missing_module_is_a_drift(tmp_path: Path) -> None:
    assert {drift.found for drift in check(tmp_path)} == {
        f"module sglang.{need.path.partition(':')[0]} not found" for need in NEEDS
    }


def test_a_name_in_another_scope_does_not_count(tmp_path: Path) -> None:
    need = next(need for need in NEEDS if need.path == "srt.runtime_context:get_spec")
    hidden = "class Bag:\n    def get_spec(self): ...\n\ndef other():\n    get_spec = None\n"
    (drift,) = drifts_of(need, one_file(tmp_path, need, hidden))
    assert drift.found == "get_spec not found"


@pytest.mark.parametrize(
    "text",
    [
        "if True:\n    def get_spec(): ...\n",
        "if True:\n    pass\nelif True:\n    pass\nelse:\n    get_spec = None\n",
        "try:\n    from x import get_spec\nexcept ImportError:\n    def get_spec(): ...\n",
    ],
)
def test_a_name_under_a_condition_counts(text: str, tmp_path: Path) -> None:
    need = next(need for need in NEEDS if need.path == "srt.runtime_context:get_spec")
    assert drifts_of(need, one_file(tmp_path, need, text)) == []


def test_every_hook_is_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks: list[tuple[str, object]] = []
    monkeypatch.setattr(plugin, "_hook", lambda target, hook, kind: hooks.append((target, hook)))
    plugin._install_hooks()
    needs = {target_of(need): need for need in NEEDS}
    assert len(hooks) >= 11
    assert {target for target, _ in hooks} <= needs.keys()
    assert set(plugin._SEAMS) <= {target for target, _ in hooks}
    # What a hook names as the original's parameters is what the contract holds SGLang to.
    named = {
        "create_dummy_verify_input": plugin.create_dummy_verify_input,
        "from_cli_args": args.from_cli_args,
    }
    for target, hook in hooks:
        if named.get(target.rpartition(".")[2]) is hook:
            parameters = list(inspect.signature(hook).parameters)[1:]  # without `original`
            assert tuple(parameters) == needs[target].params


def imports_of_sglang() -> list[tuple[str, str]]:
    """File and ``module:name`` of each ``from sglang... import name`` that serving runs; CPU mode checks its own."""
    package = Path(plugin.__file__).parent
    found = []
    for file in sorted(package.rglob("*.py")):
        if file.is_relative_to(package / "cpu"):
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                assert not [alias.name for alias in node.names if alias.name.split(".")[0] == "sglang"], file.name
            elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang":
                module = node.module.removeprefix("sglang.")
                found += [(file.name, f"{module}:{alias.name}") for alias in node.names]
    return found


def test_everything_imported_from_sglang_is_covered() -> None:
    """By a row of its own, or by one of a member; either is checked where the name is imported from."""
    needed = {need.path for need in NEEDS}
    owners = {path.partition(":")[0] + ":" + path.partition(":")[2].partition(".")[0] for path in needed}
    imports = imports_of_sglang()
    assert len(imports) > 40
    assert [missing for missing in imports if missing[1] not in owners] == []


def test_the_options_read_are_covered() -> None:
    """``getattr(cfg, field, None)`` would find any misspelt option fine, for ever."""
    fields = {field for need in NEEDS if need.path.startswith("srt.arg_groups.fields.") for field in need.params}
    read = set(re.findall(r"\bcfg\.(\w+)", inspect.getsource(args)))
    assert len(read) > 10
    assert read | {field for field, *_ in args._REFUSED} | set(args._ATTENTION_FIELDS) <= fields


def test_what_the_worker_reads_of_itself_is_covered() -> None:
    """Every ``self.NAME`` of ``DDTreeWorker`` that it does not define itself is upstream's, and needs a row."""
    from sglang_dflash import worker

    tree = ast.parse(Path(worker.__file__).read_text())
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "DDTreeWorker")
    own = {n.name for n in cls.body if isinstance(n, ast.FunctionDef)}
    of_self = [n for n in ast.walk(cls) if isinstance(n, ast.Attribute) and ast.unparse(n.value) == "self"]
    own |= {n.attr for n in of_self if isinstance(n.ctx, ast.Store)} - {"_draft_sampler"}
    read = {n.attr for n in of_self if isinstance(n.ctx, ast.Load)} - own
    assert len(read) > 10
    owners = ("DFlashWorkerV2.", "BaseSpecWorker.")
    covered = {need.path.rpartition(".")[2] for need in NEEDS if need.path.partition(":")[2].startswith(owners)}
    assert read - covered == set()


MEMBERS = """
class Base:
    inherited: int

    def prepare(self):
        self.prepared = 1

class Middle(Base):
    pass

class Owner(Middle):
    def __init__(self):
        self.plain = 1
        self.annotated: int = 2
        first, self.unpacked = 1, 2
        local = 3
        self.plain.nested = 4
        other.foreign = 5
        self.read_only

        def inner():
            self.later = 6
"""


@pytest.mark.parametrize(
    ("name", "found"),
    dict.fromkeys(("plain", "annotated", "unpacked", "later", "inherited", "prepared"), True).items()
    | dict.fromkeys(("local", "first", "nested", "foreign", "read_only", "inner", "absent"), False).items(),
)
def test_a_member_may_be_assigned_to_self(
    name: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    need = Need(f"srt.thing:Owner.{name}", (), "a test")
    monkeypatch.setattr(contract, "NEEDS", (need,))
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt/thing.py").write_text(MEMBERS)
    assert [drift.found for drift in check(tmp_path)] == ([] if found else [f"{name} not found"])


def test_text_that_looks_like_a_definition_does_not_hide_one(tmp_path: Path) -> None:
    """Definitions are cut out of the text; where that fails the whole module is parsed."""
    need = next(need for need in NEEDS if need.path == "srt.runtime_context:get_spec")
    quoted = '''"""An example:\ndef get_spec(: of old\n"""\n'''
    assert drifts_of(need, one_file(tmp_path, need, quoted + "def get_spec():\n    return 1\n")) == []
    (drift,) = drifts_of(need, one_file(tmp_path, need, quoted + "get_spec(1)\n"))
    assert drift.found == "get_spec not found"


@pytest.mark.parametrize("version", ["0.5.22", "0.5.23.post1", None])
def test_another_release_is_a_drift(version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the installed SGLang; a copy elsewhere has no version to ask for."""
    monkeypatch.setattr(contract, "installed_version", lambda: version)
    (drift,) = check()
    assert drift.found == f"found {version}, want 0.5.23"
    assert str(drift) == f"sglang.version: found {version}, want 0.5.23"
    assert check(ROOT) == []


def test_the_check_leaves_the_collector_as_it_was(tmp_path: Path) -> None:
    assert gc.isenabled()
    check(tmp_path)
    assert gc.isenabled()

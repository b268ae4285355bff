"""The contract: this SGLang meets it, and any renamed name or dropped parameter is noticed and named."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest

from sglang_dflash import args, plugin
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


@pytest.mark.parametrize("need", NEEDS, ids=lambda need: need.path)
def test_a_renamed_name_is_a_drift(need: Need, tmp_path: Path) -> None:
    """Only the definition is renamed: what still uses the old name must not pass for it."""
    name = need.path.rpartition(":")[2].rpartition(".")[2]
    text = source_of(need).read_text()
    definition = rf"^(\s*(?:async )?(?:def|class) |\s*){re.escape(name)}\b(?=\s*[(:=])"
    renamed, count = re.subn(definition, rf"\g<1>{name}_of_old", text, flags=re.MULTILINE)
    assert count >= 1
    ast.parse(renamed)
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
        assert parameter in drift.found.partition("has")[0]


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


def test_everything_imported_from_sglang_exists() -> None:
    """Each `from sglang... import name` of this package names something this SGLang has."""
    package = Path(plugin.__file__).parent
    found = 0
    for file in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang."):
                module = node.module.removeprefix("sglang.")
                for alias in node.names:
                    need = Need(f"{module}:{alias.name}", (), "imported")
                    below = ROOT.joinpath(*module.split("."), f"{alias.name}.py")
                    text = source_of(need).read_text() if source_of(need).is_file() else ""
                    assert below.is_file() or re.search(rf"\b{alias.name}\b", text), (
                        f"{file.name}: {node.module}.{alias.name}"
                    )
                    found += 1
    assert found > 40

"""The entry point fails closed: without every hook in force DFLASH is refused, and nothing else is."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

import pytest
from models import make_dense, make_drafter

from sglang_dflash import contract, plugin
from sglang_dflash.config import SettingError, TreeConfig
from sglang_dflash.contract import Drift, Need
from sglang_dflash.cpu import stand_in

stand_in.install()  # before SGLang's modules: their CPU path imports sgl_kernel

from sglang.srt.plugins.hook_registry import HookRegistry  # noqa: E402
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm  # noqa: E402

DRIFT = Drift(Need("srt.somewhere:thing", (), "a test"), "thing not found")
TREE = TreeConfig(block_size=8, topk=4, budget=20)


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any, str]]:
    """What gets registered, without touching SGLang; no CPU mode, not switched off."""
    seen: list[tuple[str, Any, str]] = []
    monkeypatch.setattr(HookRegistry, "register", lambda target, hook, kind: seen.append((target, hook, kind.name)))
    monkeypatch.setattr(plugin, "_hooked", [])
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.delenv("SGLANG_DFLASH", raising=False)
    return seen


FLAGS = {
    plugin._ADD_FLAGS,
    plugin._PARSED,
}  # taken even where no tree is served, so that argparse does not hide the reason


def targets(hooks: list[tuple[str, Any, str]]) -> set[str]:
    return {target for target, _, _ in hooks}


def test_everything_in_order_installs_every_hook(hooks: list) -> None:
    plugin.register()
    assert set(plugin._SEAMS) < targets(hooks)
    assert plugin._hooked == [target for target, _, _ in hooks]
    assert len(plugin._hooked) == len(set(plugin._hooked))


@pytest.mark.parametrize("value", ["off", "OFF"])
def test_switched_off_only_takes_and_ignores_the_flags(
    value: str, hooks: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SGLANG_DFLASH", value)
    monkeypatch.setattr(contract, "check", lambda: [DRIFT])
    plugin.register()
    assert targets(hooks) == FLAGS
    (ignore,) = (hook for target, hook, _ in hooks if target.endswith("from_cli_args"))
    given = argparse.Namespace(speculative_ddtree_topk=8, speculative_eagle_topk=None)
    with caplog.at_level("WARNING"):
        assert ignore(lambda cls, args: (cls, args), str, given) == (str, given)
    assert given.speculative_eagle_topk is None
    assert "--speculative-ddtree-topk 8 is ignored: SGLANG_DFLASH is off" in caplog.text


@pytest.mark.parametrize("value", ["on", "On", ""])
def test_switched_on_is_the_default(value: str, hooks: list, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin.register()
    default = list(hooks)
    hooks.clear()
    monkeypatch.setenv("SGLANG_DFLASH", value)
    plugin.register()
    assert targets(hooks) == targets(default) > set(plugin._SEAMS)


@pytest.mark.parametrize("value", ["0", "1", "false", "chain", " "])
def test_any_other_switch_refuses_dflash(
    value: str, hooks: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With a message about the switch, not about the installation, and without a traceback."""
    monkeypatch.setenv("SGLANG_DFLASH", value)
    plugin.register()
    assert targets(hooks) == set(plugin._SEAMS) | FLAGS
    for target, hook, _ in hooks:
        if target in plugin._SEAMS:
            with pytest.raises(SettingError, match=rf"^SGLANG_DFLASH: found {value!r}, want on or off") as error:
                hook(lambda *_: None, SpeculativeAlgorithm.DFLASH)
            assert "Install" not in str(error.value)
    assert "Traceback" not in caplog.text


def test_a_half_failed_load_adds_the_flags_once(hooks: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice would end every command line, also without DFLASH, in argparse's conflict error."""
    monkeypatch.setattr(plugin, "create_worker", None)
    register, seen = plugin._hook, []

    def failing(target: str, hook: Any, kind: str) -> None:
        if hook is None:
            raise RuntimeError("registry drifted")
        register(target, hook, kind)
        seen.append(target)

    monkeypatch.setattr(plugin, "_hook", failing)
    plugin.register()
    assert seen.count(plugin._ADD_FLAGS) == 1
    assert set(plugin._SEAMS) <= set(seen)


def test_cpu_mode_stands_when_dflash_is_off(hooks: list, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dflash.cpu import hooks as cpu_hooks

    monkeypatch.setenv("SGLANG_DFLASH", "off")
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    called = []
    monkeypatch.setattr(cpu_hooks, "register_hooks", lambda: called.append(True))
    plugin.register()
    assert called == [True]
    assert not targets(hooks) & set(plugin._SEAMS)


def broken(*_: Any) -> None:
    raise ImportError("no module named absent")


@pytest.mark.parametrize(
    ("attribute", "value", "words"),
    [
        ((contract, "check"), lambda: [DRIFT, DRIFT], "sglang.srt.somewhere.thing: thing not found; "),
        ((contract, "check"), broken, "ImportError: no module named absent"),
        ((plugin, "_install_hooks"), broken, "ImportError: no module named absent"),
    ],
    ids=["drift", "check fails", "hooks fail"],
)
def test_whatever_is_wrong_refuses_dflash_and_only_dflash(
    attribute: tuple, value: Any, words: str, hooks: list, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*attribute, value)
    monkeypatch.setattr(sys, "argv", ["launch_server", "--speculative-algorithm", "DFLASH"])
    plugin.register()  # a seam stands, so the process lives to say why
    assert targets(hooks) == set(plugin._SEAMS) | FLAGS
    hooks = [hook for hook in hooks if hook[0] not in FLAGS]
    passed = []

    def original(*arguments: Any) -> str:
        passed.append(arguments)
        return "result"

    for target, hook, kind in hooks:
        assert kind == "AROUND"
        if target.endswith("create_worker"):
            refused = (SpeculativeAlgorithm.DFLASH, "server_args")
            served = [(SpeculativeAlgorithm.EAGLE, "server_args"), (SpeculativeAlgorithm.NONE, "server_args")]
        else:
            refused = (SimpleNamespace(speculative_algorithm="dflash"),)
            served = [(SimpleNamespace(speculative_algorithm=name),) for name in ("EAGLE", None, "NGRAM")]
        with pytest.raises(plugin.ContractError) as error:
            hook(original, *refused)
        for part in (words, "sglang==0.5.23", "SGLANG_DFLASH=off"):
            assert part in str(error.value)
        assert "\n" not in str(error.value)
        assert passed == []
        assert [hook(original, *arguments) for arguments in served] == ["result"] * len(served)
        assert passed == served
        passed.clear()


@pytest.mark.parametrize("command", [["--speculative-algorithm", "DFlash"], ["x"], []])
def test_nothing_left_to_hook(command: list[str], hooks: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """A YAML file or an Engine keyword may ask for DFLASH as well, so the command line does not decide."""
    monkeypatch.setattr(plugin, "_SEAMS", ("sglang.srt.absent.seam", "sglang.srt.utils.no_such_function"))
    monkeypatch.setattr(contract, "check", lambda: [DRIFT])
    monkeypatch.setattr(sys, "argv", ["launch_server", *command])
    with pytest.raises(SystemExit, match="thing not found"):
        plugin.register()
    assert targets(hooks) <= FLAGS


def test_a_drifted_registry_is_gone_around(hooks: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even then DFLASH is refused, by seams patched by hand, and nothing else is."""
    from sglang.srt.arg_groups import pipeline, speculative_hook

    def drifted(*_: Any) -> None:
        raise TypeError("register() takes 3 positional arguments but 4 were given")

    monkeypatch.setattr(HookRegistry, "register", drifted)
    passed: list[tuple] = []
    seams = (
        (pipeline, "run_resolution_pipeline"),
        (speculative_hook, "_handle_dflash"),
        (SpeculativeAlgorithm, "create_worker"),
    )
    for owner, name in seams:  # restored after the test, whatever register makes of them
        monkeypatch.setattr(owner, name, lambda *arguments: passed.append(arguments) or "result")
    plugin.register()
    assert targets(hooks) <= FLAGS
    for owner, name in seams[:2]:
        with pytest.raises(plugin.ContractError, match="TypeError: register"):
            getattr(owner, name)(SimpleNamespace(speculative_algorithm="DFLASH"))
        assert getattr(owner, name)(SimpleNamespace(speculative_algorithm="EAGLE")) == "result"
    with pytest.raises(plugin.ContractError, match="TypeError: register"):
        SpeculativeAlgorithm.DFLASH.create_worker("server_args")
    with pytest.raises(plugin.ContractError):
        SpeculativeAlgorithm.DFLASH.create_worker(server_args="server_args")
    assert SpeculativeAlgorithm.EAGLE.create_worker("server_args") == "result"
    assert len(passed) == 3


def test_missing_hooks_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_hooked", ["json.loads", "json.dumps"])
    monkeypatch.setattr(json, "dumps", functools.wraps(json.dumps)(lambda *a, **k: ""))
    with pytest.raises(plugin.ContractError, match=r"hooks not installed: json\.loads; want every one"):
        plugin.assert_hooks_applied()
    monkeypatch.setattr(json, "loads", functools.wraps(json.loads)(lambda *a, **k: ""))
    plugin.assert_hooks_applied()
    monkeypatch.setattr(plugin, "_hooked", [])
    with pytest.raises(plugin.ContractError, match="none registered"):
        plugin.assert_hooks_applied()


def test_the_worker_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.arg_groups import model_override_base

    from sglang_dflash.worker import DDTreeWorker

    monkeypatch.setattr(model_override_base, "resolving_view", lambda given: given)
    monkeypatch.setattr(plugin, "assert_hooks_applied", lambda: None)
    dflash, eagle = SpeculativeAlgorithm.DFLASH, SpeculativeAlgorithm.EAGLE
    for algorithm, topk, wanted in (
        (dflash, 8, DDTreeWorker),
        (dflash, 1, "upstream's"),
        (dflash, None, "upstream's"),
        (eagle, 8, "upstream's"),
    ):
        found = plugin.create_worker(lambda *_: "upstream's", algorithm, SimpleNamespace(speculative_eagle_topk=topk))
        assert found == wanted

    def unhooked() -> None:
        raise plugin.ContractError("hooks not installed")

    monkeypatch.setattr(plugin, "assert_hooks_applied", unhooked)
    with pytest.raises(plugin.ContractError):
        plugin.create_worker(lambda *_: "upstream's", dflash, SimpleNamespace(speculative_eagle_topk=8))


def test_the_warm_up_input_of_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    published = [TREE]
    monkeypatch.setattr(TreeConfig, "published", classmethod(lambda cls: published[0]))

    def dummy(algorithm: SpeculativeAlgorithm, draft: bool) -> Any:
        return plugin.create_dummy_verify_input(lambda *_: "upstream's", algorithm, "mask", 21, draft)

    tree = dummy(SpeculativeAlgorithm.DFLASH, False)
    assert tree.custom_mask == "mask"
    assert tree.draft_token_num == 21
    assert dummy(SpeculativeAlgorithm.DFLASH, True) == "upstream's"
    assert dummy(SpeculativeAlgorithm.EAGLE, False) == "upstream's"
    published[0] = None
    assert dummy(SpeculativeAlgorithm.DFLASH, False) == "upstream's"


SCRIPT = """
import json, os, sys
from sglang_dflash import contract
if sys.argv[1] == "drifted":
    contract.NEEDS += (contract.Need("srt.nowhere:absent", (), "a test"),)
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
from sglang.srt.server_args import ServerArgs
given = {"model_path": sys.argv[2], "device": "cpu"}
dflash = {"speculative_algorithm": "DFLASH", "speculative_draft_model_path": sys.argv[3]}
for options in ({}, dflash):  # as sglang.Engine makes them, then a command line, which ends the process
    try:
        ServerArgs(**given, **options).resolve_once()
        print("SERVED")
    except Exception as error:
        print(type(error).__name__, error)
flags = [f"--{name.replace('_', '-')}={value}" for name, value in {**given, **dflash}.items()]
prepare_server_args([*flags, "--speculative-ddtree-topk=4"]).resolve_once()
print("SERVED")
"""


@pytest.mark.parametrize("state", ["intact", "drifted"])
def test_in_sglangs_own_start(state: str, tmp_path: Path) -> None:
    """Hooks registered, applied and run by SGLang itself."""
    target = make_dense(tmp_path / "target")
    drafter = make_drafter(tmp_path / "drafter", target)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, state, str(target), str(drafter)],
        env=environment | {"SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    plain, dflash, *command_line = [
        line for line in done.stdout.splitlines() if line.startswith(("SERVED", "Contract"))
    ]
    assert plain == "SERVED", done.stderr
    if state == "intact":
        assert [dflash, *command_line] == ["SERVED"] * 2, done.stderr
        assert done.returncode == 0
    else:
        assert command_line == []
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        for last in (dflash, done.stderr.splitlines()[-1].replace("error: ", "ContractError ")):
            assert last.startswith("ContractError sglang-dflash: DFLASH is refused")
            assert "module sglang.srt.nowhere not found" in last


def test_a_failure_is_logged_with_its_trace(
    hooks: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(plugin, "_install_hooks", broken)
    with caplog.at_level(logging.ERROR, "sglang_dflash.plugin"):
        plugin.register()
    assert any(record.exc_info for record in caplog.records)
    assert "DFLASH is refused" in caplog.text


@pytest.mark.parametrize("setting", ["on", "maybe"])
def test_the_other_processes_of_a_server_say_nothing(
    setting: str, hooks: list, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server without speculation would log the same several times."""
    monkeypatch.setenv("SGLANG_DFLASH", setting)
    monkeypatch.setattr(plugin, "_install_hooks", broken)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    plugin.register()
    assert set(plugin._SEAMS) <= targets(hooks)
    assert caplog.text == ""


def test_a_replaced_class_counts_as_hooked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_hooked", ["json.JSONDecoder"])
    with pytest.raises(plugin.ContractError, match=r"hooks not installed: json\.JSONDecoder"):
        plugin.assert_hooks_applied()
    ours = type("Ours", (json.JSONDecoder,), {"__module__": "sglang_dflash.refusals"})
    monkeypatch.setattr(json, "JSONDecoder", ours)
    plugin.assert_hooks_applied()

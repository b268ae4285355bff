"""The command line without a server: quick help, one line an error, nothing half written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import random_pair
from training_data import write_data, write_target

from sglang_dflash.train import cli

COMMANDS = ("prepare", "fit", "eval", "export", "import", "parity")


def error_of(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """The one line a failing command prints."""
    assert cli.main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_help_is_quick_because_it_imports_nothing_heavy() -> None:
    program = (
        "import sys; from sglang_dflash.train.cli import main; status = main(sys.argv[1:]);"
        "heavy = {'torch', 'transformers', 'sglang', 'numpy', 'yaml', 'httpx'} & set(sys.modules);"
        "print(sorted(heavy), file=sys.stderr); sys.exit(status)"
    )
    for args in (["--help"], *([c, "--help"] for c in COMMANDS)):
        done = subprocess.run([sys.executable, "-c", program, *args], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "[]\n"), args
        assert "Usage" in done.stdout


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["nix"], "No such command 'nix'"),
        ([], "Missing command"),
        (["eval", "--target", "t"], "--drafter"),
        (["eval", "--target", "t", "--drafter", "d", "--prompts", "p", "--max-tokens", "x"], "'--max-tokens'"),
        (["export", "--run", "/no/run", "--out", "/tmp/never"], "run.json"),
        (["fit", "--target", "/no", "--data", "/no", "--out", "/no", "--", "--tp-size", "2"], "--online"),
        (["fit", "--target", "/no", "--data", "/no", "--out", "/no"], "no such directory"),
        (["fit", "--target", "/no", "--data", "/no", "--out", "/no", "--config", "/no.yaml"], "/no.yaml"),
        (["eval", "--target", "/no", "--drafter", "/no", "--prompts", "humaneval"], "/no"),
        (["parity", "--target", "/no", "--", "stray"], "'stray'"),
        (["import", "--target", "/no", "--drafter", "/no", "--out", "/tmp/never"], "no such directory"),
    ],
)
def test_an_error_is_one_line_and_status_2(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in error_of(capsys, *args)
    assert not Path("/tmp/never").exists()


def test_a_programming_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "_say", lambda line: None)

    def broken(*_: object, **__: object) -> None:
        raise KeyError("ours")

    monkeypatch.setattr("sglang_dflash.train.export.export", broken)
    with pytest.raises(KeyError):
        cli.main(["export", "--run", "a", "--out", "b"])


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("sglang_dflash.train.export.export", interrupted)
    assert cli.main(["export", "--run", "a", "--out", "b"]) == 130
    assert capsys.readouterr().err.split() == ["interrupted"]


def test_ctrl_c_ends_the_servers_of_an_evaluation(tmp_path: Path) -> None:
    """While a server starts: exit status 130, no traceback, no process left."""
    target, drafter = random_pair.write(tmp_path / "models")
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"prompt": "a"}) + "\n")
    line = [sys.executable, "-m", "sglang_dflash.train", "eval", "--target", str(target), "--drafter", str(drafter)]
    process = subprocess.Popen(
        [*line, "--prompts", str(prompts)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert process.stderr is not None
    said = ""
    while "starting the server" not in said:
        said = process.stderr.readline()
        assert said, "it ended before it started a server"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(60) == 130
    assert rest.rstrip().endswith("interrupted")
    assert "Traceback" not in rest
    left = subprocess.run(["pgrep", "-f", str(target)], capture_output=True, text=True, check=False).stdout
    assert left == ""


def test_flags_behind_the_dashes() -> None:
    args = ["--tp-size", "2", "--enable-x", "--mem-fraction-static=0.8", "--name", "a b"]
    flags = {"tp-size": "2", "enable-x": "", "mem-fraction-static": "0.8", "name": "a b"}
    assert cli.server_flags(args) == flags
    settings = {"tp_size": 2, "enable_x": True, "mem_fraction_static": 0.8, "name": "a b"}
    assert cli.engine_settings(args) == settings
    with pytest.raises(Exception, match="'stray'"):
        cli.server_flags(["stray"])


def test_a_servers_refusal_is_the_line_that_is_shown() -> None:
    tail = "chain: server exited with 2; log /l, its end:\nsome notice\nerror: fc: found 1, wanted 2; use another"
    assert cli.one_line(RuntimeError(tail)) == (
        "chain: server exited with 2; log /l: fc: found 1, wanted 2; use another"
    )
    assert cli.one_line(RuntimeError("a\nb")) == "a"
    assert cli.one_line(RuntimeError()) == "RuntimeError"


def test_fit_and_export_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Data and recipe to a drafter's folder, in processes of their own as a user runs them."""
    target, data = write_target(tmp_path / "target"), write_data(tmp_path / "data")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "drafter: {layers: 1, heads: 2, kv_heads: 1, head_dim: 8, intermediate: 16, block_size: 4, mask_token_id: 63}\n"
        "gamma: 4.0\nanchors: 4\nmax_length: 40\nepochs: 1\ndtype: float32\ntree_budgets: [3]\ntensorboard: false\n"
    )
    program = [sys.executable, "-m", "sglang_dflash.train"]
    common = ["--target", str(target), "--data", str(data), "--out", str(tmp_path / "run"), "--config", str(recipe)]
    done = subprocess.run([*program, "fit", *common], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "drafter"
    export = [*program, "export", "--run", str(tmp_path / "run"), "--out", str(out)]
    done = subprocess.run(export, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{out}\n"), done.stderr
    assert {f.name for f in out.iterdir()} == {"config.json", "model.safetensors", "provenance.json"}
    done = subprocess.run(export, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1

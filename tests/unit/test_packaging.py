"""What the wheel holds: every package that the source tree holds, under the names that users import."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import entry_points
from pathlib import Path

import pytest

import sglang_dflash

ROOT = Path(__file__).parents[2]
FOLDERS = {
    "sglang_dflash": "sglang_dflash",
    "train": "sglang_dflash/train",
    "loadtest": "sglang_dflash/loadtest",
}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def wheel_names(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    # From a copy: setuptools would reuse a build/ folder, and with it files that are gone.
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "-q",
        "-w",
        str(out),
    ]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = out.glob("*.whl")
    assert f"-{sglang_dflash.__version__}-" in wheel.name
    return {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}


def test_the_wheel_holds_every_module(wheel_names: set[str]) -> None:
    sources = {
        f"{installed}/{file.relative_to(ROOT / folder)}"
        for folder, installed in FOLDERS.items()
        for file in (ROOT / folder).rglob("*.py")
    }
    assert {name for name in wheel_names if name.endswith(".py")} == sources
    assert "sglang_dflash/py.typed" in wheel_names


def test_no_other_top_level_name_is_installed(wheel_names: set[str]) -> None:
    assert {name.split("/")[0] for name in wheel_names} == {"sglang_dflash"}


def test_both_entry_points_load() -> None:
    for group, name in (
        ("sglang.srt.plugins", "sglang_dflash"),
        ("sglang.srt.platforms", "sglang_dflash_cpu"),
    ):
        (point,) = (p for p in entry_points(group=group) if p.name == name)
        assert point.value == PROJECT["project"]["entry-points"][group][name]
        assert callable(point.load())


def test_installing_beside_a_server_pulls_in_no_accelerator_stack() -> None:
    named = {d.split(">")[0].split("=")[0].strip() for d in PROJECT["project"]["dependencies"]}
    assert named == {"httpx", "numpy", "rich", "safetensors"}


@pytest.mark.parametrize("name", ["cpu", "dev", "gpu", "gpu-source"])
def test_locks_pin_every_name_once(name: str) -> None:
    lines = (ROOT / "requirements" / f"{name}.lock").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(pin.count("==") == 1 and "+" not in pin for pin in pins)
    names = [pin.split("==")[0].lower().replace("_", "-") for pin in pins]
    assert len(names) == len(set(names))

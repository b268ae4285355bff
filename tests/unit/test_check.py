"""`python -m sglang_dflash.check`: silent about nothing that would keep a tree from being served."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_dflash import check, contract
from sglang_dflash.serving_kernels import importers, resolve, serving_kernels

ROOT = contract.sglang_root()
SETTINGS = (
    "SGLANG_PLUGINS",
    "SGLANG_PLATFORM",
    "SGLANG_DFLASH",
    "SGLANG_USE_CPU_ENGINE",
    "TORCHINDUCTOR_CACHE_DIR",  # torch sets it once it is imported
)


def run(**settings: str) -> tuple[int, str]:
    environment = {k: v for k, v in os.environ.items() if k not in SETTINGS} | settings
    command = [sys.executable, "-m", "sglang_dflash.check"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    for name in SETTINGS:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def copy_of_sglang(home: Path) -> Path:
    """The serving part of the package, as links, so that single files can be replaced."""
    copy = home / "sglang"
    for folder in ("srt", "kernels"):
        for file in (ROOT / folder).rglob("*.py"):
            link = copy / file.relative_to(ROOT)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file)
    (copy / "__init__.py").touch()
    return copy


def edit(copy: Path, file: str, old: str, new: str) -> None:
    text = (copy / file).read_text()
    assert old in text
    (copy / file).unlink()
    (copy / file).write_text(text.replace(old, new))


def test_this_installation_is_good() -> None:
    code, out = run(SGLANG_USE_CPU_ENGINE="1")
    assert code == 0, out
    assert "CPU mode" in out
    for need in contract.NEEDS:
        assert need.path.partition(":")[2][:20] in out
    assert "sglang_dflash.cpu.ops.causal_conv1d" in out
    assert "All good" in out
    assert "OFF:" not in out


def test_a_drifted_sglang_is_named(tmp_path: Path) -> None:
    copy = copy_of_sglang(tmp_path)
    edit(copy, "srt/speculative/dflash_worker_v2.py", "def _draft_write_ids(", "def _draft_slots(")
    edit(copy, "srt/layers/attention/linear/kernels/gdn_triton.py", "chunk_gated_delta_rule", "chunked_rule")
    code, out = run(PYTHONPATH=str(tmp_path), SGLANG_USE_CPU_ENGINE="1")
    assert code == 1
    off = [line for line in out.splitlines() if line.startswith("OFF: ")]
    assert "DFlashWorkerV2._draft_write_ids: _draft_write_ids not found" in off[0]
    assert "install sglang==0.5.23" in off[0]
    assert off[-1].startswith("OFF: kernels: gated delta rule, prefill: found ")
    assert all("chunk_gated_delta_rule" in line for line in off[1:])


FILTERS: list[tuple[dict[str, str], str | None]] = [
    ({}, None),
    ({"SGLANG_PLUGINS": "other"}, "SGLANG_PLUGINS: found other, want sglang_dflash among them"),
    ({"SGLANG_PLUGINS": "sglang_dflash"}, "want sglang_dflash_cpu among them"),
    ({"SGLANG_PLUGINS": "sglang_dflash, sglang_dflash_cpu"}, None),
    ({"SGLANG_PLUGINS": "sglang_dflash", "SGLANG_PLATFORM": "sglang_dflash_cpu"}, None),
    ({"SGLANG_PLATFORM": "other"}, "SGLANG_PLATFORM: found other"),
]


def test_a_filter_is_off() -> None:
    code, out = run(SGLANG_USE_CPU_ENGINE="1", SGLANG_PLUGINS="other")
    assert code == 1
    assert "OFF: SGLANG_PLUGINS: found other, want sglang_dflash among them" in out


@pytest.fixture(scope="module")
def loaded_by_sglang() -> list[bool]:
    """SGLang itself, asked whether it would load both entry points under each of FILTERS."""
    script = f"""
import os
from sglang.srt import platforms, plugins
for settings, _ in {FILTERS!r}:
    for name in ("SGLANG_PLUGINS", "SGLANG_PLATFORM"):
        os.environ.pop(name, None)
    os.environ.update(settings)
    loaded = plugins.load_plugins_by_group(plugins.GENERAL_PLUGINS_GROUP, plugins._get_excluded_dists())
    try:
        platform = type(platforms._resolve_platform()).__name__
    except RuntimeError:
        platform = "none"
    print("both:", "sglang_dflash" in loaded and platform == "DFlashCpuPlatform")
"""
    environment = {k: v for k, v in os.environ.items() if k not in SETTINGS}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | {"SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return [line == "both: True" for line in done.stdout.splitlines() if line.startswith("both:")]


@pytest.mark.parametrize("case", range(len(FILTERS)))
def test_filters_follow_sglang(clean: pytest.MonkeyPatch, case: int, loaded_by_sglang: list[bool]) -> None:
    settings, wanted = FILTERS[case]
    clean.setenv("SGLANG_USE_CPU_ENGINE", "1")
    for name, value in settings.items():
        clean.setenv(name, value)
    report = check.Report()
    check.check_entry_points(report, "cpu")
    assert loaded_by_sglang[case] == (wanted is None)
    assert len(report.problems) == len(set(report.problems))
    assert any((wanted or "") in problem for problem in report.problems) == (wanted is not None)


def test_switched_off_is_noted(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("SGLANG_DFLASH", "off")
    report = check.Report()
    check.check_entry_points(report, "cpu")
    assert "SGLANG_DFLASH=off" in report.notes[0]
    assert not report.problems


def test_an_empty_switch_is_unset(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("SGLANG_DFLASH", "")
    report = check.Report()
    check.check_entry_points(report, "cuda")
    assert report.problems == []


def test_a_home_that_cannot_be_written_is_off(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, out = run(SGLANG_USE_CPU_ENGINE="1", HOME=str(tmp_path / "file"))
    assert code == 1
    (off,) = [line for line in out.splitlines() if line.startswith("OFF: ")]
    assert off.startswith(f"OFF: cache directory: found {tmp_path / 'file'}")


@pytest.mark.parametrize("value", ["0", "false", "of"])
def test_a_switch_that_says_neither_is_a_problem(value: str, clean: pytest.MonkeyPatch) -> None:
    clean.setenv("SGLANG_DFLASH", value)
    report = check.Report()
    check.check_entry_points(report, "cpu")
    assert report.problems == [f"SGLANG_DFLASH: found {value!r}, want on or off; correct or unset it"]


def test_missing_and_broken_entry_points(clean: pytest.MonkeyPatch) -> None:
    broken = importlib.metadata.EntryPoint("sglang_dflash", "sglang_dflash.absent:register", check.PLUGIN[0])
    clean.setattr(importlib.metadata, "entry_points", lambda group: [broken] if group == check.PLUGIN[0] else [])
    report = check.Report()
    check.check_entry_points(report, "cuda")
    assert len(report.problems) == 2
    assert "sglang_dflash.absent:register failing" in report.problems[0]
    assert report.problems[1].startswith("entry point sglang_dflash_cpu: found none")


def test_the_cpu_platform_must_not_be_forced_on_a_gpu(clean: pytest.MonkeyPatch) -> None:
    clean.setenv("SGLANG_PLATFORM", "sglang_dflash_cpu")
    report = check.Report()
    check.check_entry_points(report, "cuda")
    assert [problem.partition(",")[0] for problem in report.problems] == ["SGLANG_PLATFORM: found sglang_dflash_cpu"]


@pytest.mark.parametrize(
    ("found", "problems"),
    [
        ({"sglang": "0.5.24"}, ["sglang: found 0.5.24, want 0.5.23; run pip install 'sglang==0.5.23'"]),
        ({"triton": None}, ["triton: found none, want any version; run pip install 'triton'"]),
        ({"torch": "2.14.1+cu130"}, []),
        ({"torch": "2.13.0+cpu"}, ["torch: found 2.13.0+cpu, want 2.14.1; run pip install 'torch==2.14.1'"]),
    ],
)
def test_versions_on_a_gpu(clean: pytest.MonkeyPatch, found: dict, problems: list[str]) -> None:
    good = {
        "sglang": "0.5.23",
        "torch": "2.14.1",
        "triton": "3.8.0",
        "transformers": "5.19.0",
        "sglang-kernel": "0.4.10",
        "flashinfer-python": "0.7.2",
    }
    clean.setattr(check, "installed", lambda name: (good | found).get(name))
    report = check.Report()
    check.check_versions(report, "cuda")
    assert report.problems == problems


def test_a_missing_package_is_off_only_where_sglang_imports_it(clean: pytest.MonkeyPatch, tmp_path: Path) -> None:
    copy = copy_of_sglang(tmp_path)
    clean.setattr(check, "installed", lambda name: None)
    report = check.Report()
    check.check_kernels(report, copy, "cuda")
    assert report.problems == []
    edit(copy, "srt/models/qwen3_next.py", "import torch\n", "import torch\nfrom fla.ops import gla\n")
    assert importers(copy, "fla") == ["sglang.srt.models.qwen3_next"]
    check.check_kernels(report, copy, "cuda")
    (problem,) = report.problems
    assert problem.startswith("flash-linear-attention: found none, want one for sglang.srt.models.qwen3_next")


def test_kernels_on_a_gpu_are_sglangs_own() -> None:
    paths = {kernel.operation: kernel.path for kernel in serving_kernels(ROOT, "cuda")}
    own, conv = "sglang.kernels.ops.attention.", "sglang.kernels.ops.mamba.causal_conv1d_triton:"
    assert paths == {
        "gated delta rule, verify (tree)": own
        + "linear.fused_sigmoid_gating_recurrent:fused_sigmoid_gating_delta_rule_update",
        "gated delta rule, prefill": own + "fla.chunk:chunk_gated_delta_rule",
        "gated delta rule, decode": own + "fla.fused_recurrent:fused_recurrent_gated_delta_rule_packed_decode",
        "causal conv1d, verify (tree)": conv + "causal_conv1d_update",
        "causal conv1d, prefill": conv + "causal_conv1d_fn",
    }


def test_resolving_agrees_with_an_import() -> None:
    """What the source says about the CPU is what SGLang's modules hold once they are imported."""
    script = (
        "from sglang_dflash.cpu import stand_in; stand_in.install();"
        "from sglang.srt.layers.attention.linear import gdn_backend as b;"
        "from sglang.srt.layers.attention.linear.kernels import gdn_triton as k;"
        "print([f.__module__ + ':' + f.__name__ for f in (k.fused_sigmoid_gating_delta_rule_update, "
        "k.chunk_gated_delta_rule, b.causal_conv1d_update, b.causal_conv1d_fn)])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"SGLANG_USE_CPU_ENGINE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == str([kernel.path for kernel in serving_kernels(ROOT, "cpu")])
    module = "srt.layers.attention.mamba.causal_conv1d"
    assert resolve(ROOT, module, "causal_conv1d_fwd", "cuda") == "sglang.kernels.ops.mamba:causal_conv1d_fwd"


def test_an_empty_environment_names_each_package_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """And advises the set for the machine at hand: SGLang's own requirements are the CUDA stack."""

    def absent() -> Path:
        raise ModuleNotFoundError("sglang is not installed")

    monkeypatch.setattr(check, "installed", lambda name: None)
    monkeypatch.setattr(check.contract, "sglang_root", absent)
    monkeypatch.setattr(check, "check_device", lambda report: "cpu")
    report = check.run_checks()
    named = [problem.split(":")[0] for problem in report.problems]
    assert {"sglang", "torch", "triton"} <= set(named)
    assert len(named) == len(set(named))
    assert not any("pip install 'torch" in problem for problem in report.problems)
    assert any("requirements/cpu.lock" in problem for problem in report.problems)

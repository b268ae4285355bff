"""`python -m sglang_dflash.check`: will this installation serve DDTree? Starts no server and loads no model.

Prints what the plugin relies on in SGLang, the versions and kernels found, and the entry points; then every
problem with its remedy. Exit status 0 when there is none, else 1.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_dflash import contract
from sglang_dflash.server_process import cache_problem
from sglang_dflash.serving_kernels import importers, serving_kernels

DISTRIBUTION = "sglang-dflash"
PLUGIN = ("sglang.srt.plugins", "sglang_dflash")
PLATFORM = ("sglang.srt.platforms", "sglang_dflash_cpu")
CPU_SWITCH = "SGLANG_USE_CPU_ENGINE"

#: Distributions SGLang serves with: name, needed on CUDA, needed on a CPU.
_SERVED_WITH = (
    ("torch", True, True),
    ("triton", True, True),
    ("transformers", True, True),
    ("sglang-kernel", True, False),
    ("flashinfer-python", True, False),
)
#: Distributions of the same operations, which SGLang does without: name, module.
_BESIDE = (("flash-linear-attention", "fla"), ("causal-conv1d", "causal_conv1d"))


@dataclass
class Report:
    """What was found; filled by the `check_*` functions, one after the other."""

    tables: list[Table] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def table(self, title: str, *columns: str) -> Table:
        table = Table(title=title, title_justify="left")
        for column in columns:
            table.add_column(column, overflow="fold")
        self.tables.append(table)
        return table


def installed(distribution: str) -> str | None:
    """The version found, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def pins(distribution: str, extra: str | None = None) -> dict[str, str]:
    """Exact versions that a distribution requires, by name: of its base requirements, or of one extra."""
    try:
        requirements = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    found = {}
    for requirement in requirements:
        pin = re.match(r"([A-Za-z0-9._-]+)(?:\[[^]]*])?\s*==\s*([^\s;,]+)", requirement)
        of_extra = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
        if pin and (of_extra.group(1) if of_extra else None) == extra:
            found[re.sub(r"[._]", "-", pin.group(1).lower())] = pin.group(2)
    return found


def check_contract(report: Report, root: Path) -> None:
    drifts = contract.check(root)
    found_by_need = {drift.need: drift.found for drift in drifts}
    table = report.table(f"What the plugin relies on, in {root}", "sglang.", "used for", "state")
    for need in contract.NEEDS:
        found = found_by_need.get(need)
        table.add_row(need.path, need.use, "[green]ok" if found is None else f"[red]{found}")
    for drift in drifts:
        report.problems.append(
            f"contract: {drift}; install sglang=={contract.SGLANG_VERSION} (until then DFLASH is refused)"
        )


# SGLang's own requirements are the CUDA stack, so a plain `pip install` would be the wrong advice here.
_CPU_REMEDY = "install the set for machines without a GPU: pip install --no-deps -r requirements/cpu.lock"


def check_versions(report: Report, platform: str) -> None:
    table = report.table("Versions", "package", "found", "wanted", "state")
    wanted = pins("sglang") if platform == "cuda" else pins(DISTRIBUTION, "cpu")
    rows: list[tuple[str, str | None, bool]] = [("sglang", contract.SGLANG_VERSION, True)]
    rows += [(name, wanted.get(name), cuda if platform == "cuda" else cpu) for name, cuda, cpu in _SERVED_WITH]
    for name, pin, needed in rows:
        found = installed(name)
        # A local part (+cu130, +cpu) says how it was built, not which version it is.
        good = found is not None and (pin is None or found.partition("+")[0] == pin)
        if not needed:
            state = f"not used on {platform.upper()}" if platform == "cpu" else "not used"
        else:
            state = "[green]ok" if good else "[red]missing" if found is None else "[red]differs"
        table.add_row(name, found or "-", pin or "any", state)
        if needed and not good:
            what = f"{name}=={pin}" if pin else name
            report.problems.append(
                f"{name}: found {found or 'none'}, want {pin or 'any version'}; "
                + (f"run pip install '{what}'" if platform == "cuda" else _CPU_REMEDY)
            )


def check_device(report: Report) -> str:
    """The platform that SGLang would serve on here, "cuda" or "cpu"."""
    try:
        import torch
    except ImportError as error:
        if installed("torch"):  # else the table of versions says it
            report.problems.append(f"torch: found one that does not import ({error}), want one; reinstall torch")
        return "cuda" if os.path.exists("/dev/nvidiactl") else "cpu"
    asked_for_cpu = os.environ.get(CPU_SWITCH) == "1"
    if torch.cuda.is_available() and torch.version.cuda is not None and not asked_for_cpu:
        major, minor = torch.cuda.get_device_capability()
        count = torch.cuda.device_count()
        report.notes.append(
            f"Device: {count} x {torch.cuda.get_device_name()}, sm_{major}{minor}, CUDA {torch.version.cuda}."
        )
        return "cuda"
    if asked_for_cpu:
        report.notes.append(f"Device: CPU mode ({CPU_SWITCH}=1).")
        return "cpu"
    if os.path.exists("/dev/nvidiactl"):
        report.problems.append(
            f"device: found an NVIDIA driver and torch {torch.__version__} that sees no GPU, want a CUDA "
            f"build; install the torch that sglang requires, or set {CPU_SWITCH}=1 to serve on the CPU"
        )
        return "cuda"
    report.notes.append(f"Device: no GPU. Serving here needs {CPU_SWITCH}=1 (CPU mode).")
    return "cpu"


def check_kernels(report: Report, root: Path, platform: str) -> None:
    table = report.table(
        f"Linear attention and convolution of hybrid models, on {platform.upper()}",
        "operation",
        "runs",
        "why",
    )
    for kernel in serving_kernels(root, platform):
        table.add_row(kernel.operation, kernel.path if kernel.found else f"[red]{kernel.path}", kernel.note)
        if not kernel.found:
            report.problems.append(
                f"kernels: {kernel.operation}: found {kernel.path}, want SGLang {contract.SGLANG_VERSION}'s; "
                f"install sglang=={contract.SGLANG_VERSION}"
            )
    for distribution, module in _BESIDE:
        found, users = installed(distribution), importers(root, module)
        if not users:
            why = f"nothing in SGLang's serving path imports {module}; transformers does"
            table.add_row(f"package {distribution}", f"{found or 'absent'}: not used to serve", why)
            continue
        table.add_row(f"package {distribution}", found or "[red]absent", f"imported by {', '.join(users)}")
        if found is None and platform == "cuda":
            report.problems.append(
                f"{distribution}: found none, want one for {users[0]}; run pip install {distribution}"
            )


def check_entry_points(report: Report, platform: str) -> None:
    table = report.table("Entry points", "group", "name", "value", "state")
    for group, name in (PLUGIN, PLATFORM):
        points = [point for point in importlib.metadata.entry_points(group=group) if point.name == name]
        problem = _entry_problem(name, points)
        if problem is None:
            problem = next(_filters(name, platform), None)
        value = points[0].value if points else "-"
        table.add_row(group, name, value, "[green]ok" if problem is None else f"[red]{problem}")
        if problem is not None and problem not in report.problems:  # one variable can switch off both
            report.problems.append(problem)
    switch = os.environ.get("SGLANG_DFLASH") or "on"
    if switch.lower() == "off":
        report.notes.append("SGLANG_DFLASH=off: DFLASH is stock SGLang's chain, the tree flags are ignored.")
    elif switch.lower() != "on":
        report.problems.append(f"SGLANG_DFLASH: found {switch!r}, want on or off; correct or unset it")


def _entry_problem(name: str, points: list[importlib.metadata.EntryPoint]) -> str | None:
    reinstall = f"run pip install {DISTRIBUTION} in the environment that runs SGLang"
    if not points:
        return f"entry point {name}: found none, want one; {reinstall}"
    try:
        points[0].load()
    except Exception as error:
        return f"entry point {name}: found {points[0].value} failing ({error}), want it to load; {reinstall}"
    return None


def _filters(name: str, platform: str) -> Iterator[str]:
    """How SGLang's own selection (`__init__.py` of `srt/plugins`, `srt/platforms`) would skip `name`."""
    allowed = {part.strip() for part in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    selected = os.environ.get("SGLANG_PLATFORM")
    is_platform = name == PLATFORM[1]
    if is_platform and platform == "cuda":
        if selected == name:
            yield (
                f"SGLANG_PLATFORM: found {selected}, want unset on a GPU: that platform is for a CPU; "
                f"unset it, or set {CPU_SWITCH}=1"
            )
        return  # otherwise not needed here
    # SGLANG_PLUGINS also filters platforms, as long as SGLANG_PLATFORM does not name one.
    if allowed and name not in allowed and not (is_platform and selected):
        yield (
            f"SGLANG_PLUGINS: found {','.join(sorted(allowed))}, want {name} among them; add it, or unset the variable"
        )
    # A selected platform switches off the plugins of every distribution that brings another one.
    if selected and selected != PLATFORM[1]:
        yield (
            f"SGLANG_PLATFORM: found {selected}, want unset or {PLATFORM[1]}: SGLang skips the plugins of "
            "the packages it did not select; unset it"
        )


def run_checks() -> Report:
    """All checks on this interpreter's installation."""
    report = Report()
    platform = check_device(report)
    try:
        root = contract.sglang_root()
    except ModuleNotFoundError:
        pass  # the table of versions says so
    else:
        check_contract(report, root)
        check_kernels(report, root, platform)
    check_versions(report, platform)
    if (problem := cache_problem(os.environ)) is not None:
        report.problems.append(problem)
    check_entry_points(report, platform)
    return report


def main() -> int:
    console = Console(width=None if sys.stdout.isatty() else 160)
    report = run_checks()
    for table in report.tables:
        console.print(table)
    for note in report.notes:
        console.print(note, highlight=False)
    for problem in report.problems:
        # Never wrapped: one line a problem, for eyes and for grep.
        console.print(f"OFF: {problem}", style="red", highlight=False, markup=False, soft_wrap=True)
    if not report.problems:
        console.print("All good: DDTree can be served with this installation.", style="green")
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())

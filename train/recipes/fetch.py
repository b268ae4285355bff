"""Download the sources' distributions with pip: wheels, and sdists where a line of the sources file asks for one."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.progress import Progress

from ..errors import TrainError

#: Wheels are asked for as this Python would: their text is the same whichever Python reads it, and the pins need it.
WHEELS_FOR = "3.12"
SDIST_TOO = "sdist"
_AT_ONCE = 6


def fetch(sources: Path, out: Path) -> int:
    """Download every ``name==version`` line of ``sources`` into ``out`` and return how many files that made.

    One pip call a line, since some names are listed in two versions. A line that ends in ``# sdist`` wants the sdist
    as well, for the prose that wheels leave out. Raises TrainError with pip's last words.
    """
    jobs: list[list[str]] = []
    for line in sources.read_text().splitlines():
        requirement, _, comment = (part.strip() for part in line.partition("#"))
        if requirement:
            jobs.append([requirement, "--only-binary=:all:", f"--python-version={WHEELS_FOR}"])
            if comment == SDIST_TOO:
                jobs.append([requirement, "--no-binary=:all:"])
    out.mkdir(parents=True, exist_ok=True)
    with Progress() as progress, ThreadPoolExecutor(_AT_ONCE) as pool:
        bar = progress.add_task("download", total=len(jobs))
        for _ in pool.map(lambda job: _download(job, out), jobs):
            progress.advance(bar)
    return len(list(out.iterdir()))


def _download(job: list[str], out: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(out), *job]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["no reason given"]
        raise TrainError(f"{job[0]}: found pip exit status {done.returncode}, want its files: {said[-1]}")

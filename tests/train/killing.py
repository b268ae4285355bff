"""Kill -9 a program at random moments and start it again, until it ends by itself."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time


def run_through_kills(code: str, *, kills: int, pauses: tuple[float, float], seed: int) -> int:
    """Run the program ``code``, which prints a line once it has begun; kill it ``kills`` times, each a random time
    after that line. Returns how many runs a kill really ended: fewer when one was done before."""
    rng, killed = random.Random(seed), 0
    while True:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        process.stdout.readline()
        if killed < kills:
            time.sleep(rng.uniform(*pauses))
            process.send_signal(signal.SIGKILL)
        if process.wait() == 0:
            return killed
        assert process.returncode == -signal.SIGKILL, "the program failed by itself"
        killed += 1

"""The embedded default: a trained tiny target and its drafter, in `target/` and `drafter/` beside this file.

    python -m sglang_dflash.tiny_pair        # prints the two folders, for --model-path and the drafter's path

What they are, how good, of which texts and under which licences: README.md and corpus.json beside this file.
"""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TARGET, DRAFTER = FOLDER / "target", FOLDER / "drafter"

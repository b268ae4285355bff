"""Makes ``sglang_dflash.train`` importable from a checkout that was not installed, as on a bare GPU host."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))
import sglang_dflash  # noqa: E402

# `train/` of the repository is the subpackage; an installed package knows this already.
if str(ROOT) not in sglang_dflash.__path__:
    sglang_dflash.__path__.append(str(ROOT))

"""The out-of-tree SGLang platform that serves on a CPU, and the entry point that turns it on.

SGLang's own CPU platform refuses DFLASH and hybrid prefix caching; an out-of-tree one is asked instead.
"""

from __future__ import annotations

import os

ENGINE_SWITCH = "SGLANG_USE_CPU_ENGINE"


def is_requested() -> bool:
    """Whether the user asked for CPU mode (`SGLANG_USE_CPU_ENGINE=1`)."""
    return os.environ.get(ENGINE_SWITCH) == "1"


def activate() -> str | None:
    """`sglang.srt.platforms` entry point: the platform class's dotted path in CPU mode, else None.

    Installs the `sgl_kernel` stand-in first. It cannot wait for the plugin entry point: spawned processes
    import `scheduler.py`, and with it `sgl_kernel`, before they load plugins, but this fires at the first
    touch of `current_platform`, which is earlier.
    """
    if not is_requested():
        return None
    # bfloat16, the default, moves greedy text away from the fp32 reference within some 40 tokens.
    os.environ.setdefault("SGLANG_MAMBA_CONV_DTYPE", "float32")
    from sglang_dflash.cpu import stand_in

    stand_in.install()
    return "sglang_dflash.cpu.srt_platform.DFlashCpuPlatform"

"""What all tests share: SGLang's CPU path, no network, one thread, and property tests that repeat."""

import os

from hypothesis import settings

# Before anything imports torch or the hub client; servers started by tests inherit both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
# SGLang's modules choose their device when they are first imported, by whichever test comes first.
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from sglang_dflash.cpu import stand_in

stand_in.install()  # their CPU path imports sgl_kernel

# No deadline: the first example of a test pays for imports and kernel compilation.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

"""What all tests share: no network, one thread, and property tests that repeat."""

import os

from hypothesis import settings

# Before anything imports torch or the hub client; servers started by tests inherit both.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"

# No deadline: the first example of a test pays for imports and kernel compilation.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

"""The CPU ops against the kernels they stand for, which run in Triton's interpreter in a process of their
own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

# Largest difference allowed; exact where only integers or copies are involved.
CHECKS = {
    "gdn chain": 2e-6,
    "gdn tree": 2e-6,
    "gdn decode": 2e-6,
    "conv chain": 2e-6,
    "conv tree": 2e-6,
    "murmur hash": 0.0,
    "qk norm rope": 2**-6,  # of the largest entry: the interpreter truncates to bfloat16, torch rounds
    "track": 0.0,
}


@pytest.fixture(scope="module")
def differences():
    script = Path(__file__).with_name("upstream_kernels.py")
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "SGLANG_USE_CPU_ENGINE": "0",
        "SGLANG_PLUGINS": "none",
    }
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_equals_upstream(differences, check):
    assert differences[check] <= CHECKS[check]


def test_every_check_is_asserted(differences):
    assert set(differences) == set(CHECKS)

"""Activation, hooks and name lists, each in a process of its own: SGLang decides once a process which device
it is."""

import os
import subprocess
import sys

LOAD = """
import sglang.srt.plugins as plugins
from sglang_dflash.cpu import hooks
plugins.load_plugins_by_group = lambda *_, **__: {"cpu": (hooks.register_hooks, None)}
"""


def python(code, **environment):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
    return subprocess.run(
        [sys.executable, "-c", code], env=clean | environment, capture_output=True, text=True, check=False
    )


def test_off_unless_asked():
    code = """
import sys
from sglang_dflash.cpu.platform import activate
assert activate() is None
assert "sgl_kernel" not in sys.modules and "torch" not in sys.modules
"""
    for environment in ({}, {"SGLANG_USE_CPU_ENGINE": "0"}):
        done = python(code, **environment)
        assert done.returncode == 0, done.stderr


def test_everything_applies_and_a_lost_hook_is_named():
    code = (
        """
import os
from sglang.srt.platforms import current_platform
from sglang_dflash.cpu.srt_platform import DFlashCpuPlatform
assert isinstance(current_platform, DFlashCpuPlatform), current_platform
assert os.environ["SGLANG_MAMBA_CONV_DTYPE"] == "float32"
"""
        + LOAD
        + """
plugins.load_plugins()
hooks.assert_hooks_applied()

import sgl_kernel, torch
assert not hasattr(sgl_kernel, "convert_weight_packed")
assert not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
from sglang.srt.utils import cpu_has_amx_support
assert not cpu_has_amx_support()
try:
    sgl_kernel.rotate_input_ids_cpu()
except NotImplementedError as error:
    assert "rotate_input_ids_cpu" in str(error)
else:
    raise AssertionError("EAGLE's op did not refuse")

# Registering twice must not stack hooks.
from sglang.srt.plugins.hook_registry import HookRegistry
hooks.register_hooks()
assert all(len(HookRegistry._hooks[hook.target]) == 1 for hook in hooks.HOOKS)

# Hooks do what they are for.
x = torch.ones(3)
assert x.pin_memory() is x
x.record_stream(None)
logits = torch.randn(4, 50).log_softmax(-1)
from sglang.srt.layers.sampler import multinomial_with_seed
seeds, positions = torch.tensor([1, 1, 2, 2]), torch.tensor([5, 5, 5, 6])
same = logits[:1].expand(4, -1)
drawn = multinomial_with_seed(same, seeds, positions).flatten().tolist()
assert drawn[0] == drawn[1] and len(set(drawn)) > 1, drawn

# Any one hook undone is found by name.
import pkgutil
for hook in hooks.HOOKS:
    owner, name = hook.target.rsplit(".", 1)
    owner = pkgutil.resolve_name(owner)
    ours = getattr(owner, name)
    setattr(owner, name, ours.__wrapped__)
    try:
        hooks.assert_hooks_applied()
    except RuntimeError as error:
        assert hook.target in str(error), error
    else:
        raise AssertionError(f"{hook.target} undone and not noticed")
    setattr(owner, name, ours)
hooks.assert_hooks_applied()

from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
ATTENTION_BACKENDS["torch_native"] = print
try:
    hooks.assert_hooks_applied()
except RuntimeError as error:
    assert "torch_native" in str(error)
else:
    raise AssertionError("a foreign attention backend was not noticed")

os.environ["SGLANG_USE_CPU_ENGINE"] = "true"
try:
    hooks.register_hooks()
except RuntimeError as error:
    assert "SGLANG_USE_CPU_ENGINE='true' found, wanted '1'" in str(error)
else:
    raise AssertionError("hooks were registered outside CPU mode")
"""
    )
    done = python(code, SGLANG_USE_CPU_ENGINE="1", SGLANG_PLUGINS="sglang_dflash_cpu")
    assert done.returncode == 0, done.stderr


def test_users_conv_dtype_is_kept():
    code = """
import os
from sglang_dflash.cpu.platform import activate
activate()
assert os.environ["SGLANG_MAMBA_CONV_DTYPE"] == "bfloat16"
"""
    done = python(code, SGLANG_USE_CPU_ENGINE="1", SGLANG_MAMBA_CONV_DTYPE="bfloat16")
    assert done.returncode == 0, done.stderr

"""Run as a program: resolve serve configs through SGLang's own argument pipeline, print the results as JSON.

    python resolve_serve_config.py gpu|cpu MODELS_DIR FILE...

`gpu` makes this machine look like one with two Hopper GPUs: it answers for torch's device probes,
nvidia-smi and the native `sgl_kernel` package, and for nothing else. SGLang's parser, its resolution and
this package's hooks run as they do in `launch_server`. Model ids are replaced, on the command line, by
directories of MODELS_DIR.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import yaml

FIELDS = (
    "speculative_algorithm",
    "speculative_draft_model_path",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_num_steps",
    "speculative_dflash_block_size",
    "speculative_draft_attention_backend",
    "attention_backend",
    "device",
    "dtype",
    "tp_size",
    "context_length",
    "mem_fraction_static",
    "max_running_requests",
    "max_total_tokens",
    "max_mamba_cache_size",
    "mamba_radix_cache_strategy",
    "mamba_track_interval",
    "disable_overlap_schedule",
    "disable_radix_cache",
    "chunked_prefill_size",
)


class _NativeKernels(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for the CUDA build of `sgl_kernel`: every name imports, none is called while resolving."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] == "sgl_kernel":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        class Kernels(ModuleType):
            def __getattr__(self, name: str) -> Any:
                if name.startswith("__"):
                    raise AttributeError(name)
                mock = MagicMock(name=f"{self.__name__}.{name}")
                setattr(self, name, mock)
                return mock

        return Kernels(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing to run: names appear when they are asked for."""


def pretend_two_hopper_gpus(memory_mib: int) -> None:
    """Answer torch's and nvidia-smi's questions about the machine. Must run before SGLang is imported."""
    import torch

    from sglang_dflash.cpu.stand_in import declare_torchvision_ops

    declare_torchvision_ops()
    facts = SimpleNamespace(
        name="NVIDIA H100 80GB HBM3",
        major=9,
        minor=0,
        total_memory=memory_mib << 20,
        multi_processor_count=132,
    )
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: 2
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_properties = lambda device=None: facts
    cuda.get_device_name = lambda device=None: facts.name
    cuda.mem_get_info = lambda device=None: (facts.total_memory, facts.total_memory)
    version: Any = torch.version
    version.cuda = "13.0"
    sys.meta_path.insert(0, _NativeKernels())
    import sglang.srt.utils.common as common

    common.get_nvgpu_memory_capacity = lambda: memory_mib


def resolve(file: Path, models: Path) -> dict[str, Any]:
    """Parse and resolve one file as `launch_server --config FILE` does: FIELDS, and the keys no flag has."""
    import argparse

    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs, prepare_server_args

    values = yaml.safe_load(file.read_text())
    argv = ["--config", str(file)]
    for flag in ("model-path", "speculative-draft-model-path"):
        local = models / str(values.get(flag, "")).replace("/", "--")
        if local.is_dir():
            argv += [f"--{flag}", str(local)]
    server_args = prepare_server_args(argv)
    server_args.resolve_once()
    view = resolving_view(server_args)
    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    result = {name: getattr(view, name) for name in FIELDS}
    result["decode_graph_max_bs"] = view.cuda_graph_config.decode.max_bs
    result["unknown_keys"] = [key for key in values if f"--{key}" not in parser._option_string_actions]
    return result


def main() -> None:
    kind, models, *files = sys.argv[1:]
    os.environ["HF_HUB_OFFLINE"] = "1"
    if kind == "gpu":
        pretend_two_hopper_gpus(81559)
    from sglang.srt.plugins import load_plugins

    load_plugins()
    importlib.import_module("sglang.srt.arg_groups.pipeline")  # once, before the forks below

    results: dict[str, Any] = {}
    for name in files:
        # A process a file: resolution writes to the environment and to SGLang's globals.
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            said = io.StringIO()
            try:
                with contextlib.redirect_stderr(said):
                    result = resolve(Path(name), Path(models))
            except SystemExit as e:
                result = {"error": f"exit {e.code}: {said.getvalue()}"}
            except BaseException as e:
                result = {"error": f"{type(e).__name__}: {e}", "traceback": traceback.format_exc()}
            with os.fdopen(write, "w") as pipe:
                json.dump(result, pipe)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as pipe:
            results[Path(name).name] = json.loads(pipe.read())
        os.waitpid(child, 0)
    sys.stdout.flush()
    print("RESULTS " + json.dumps(results), flush=True)


if __name__ == "__main__":
    main()

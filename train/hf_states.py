"""transformers' hidden states of some texts, by one of its two paths, in a process of their own.

    python -m sglang_dflash.train.hf_states JOB.json

transformers chooses between fla's and causal-conv1d's kernels and its own torch code when it is imported, so each path
needs a fresh process: `parity` starts one for each. The answer names the functions that really ran, not the packages
that are installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FAST_PACKAGES = {"fla": "fla (flash-linear-attention)", "causal_conv1d": "causal-conv1d"}
_LINEAR_OPERATIONS = {
    "gated delta rule": ("chunk_gated_delta_rule", "torch_chunk_gated_delta_rule"),
    "causal conv1d": ("causal_conv1d_fn",),
}
# Said by transformers when a kernel is missing: its 5.x wording and the older one.
_FALLBACK_WORDS = ("falling back to its reference", "fast path is not available")


def hide_fast_packages() -> None:
    """Make transformers take its torch path. Before it is imported."""
    for name in FAST_PACKAGES:
        sys.modules[name] = None  # type: ignore[assignment]


def missing_packages() -> list[str]:
    """Fast-path packages that cannot be found here, by the names people install."""
    return [title for name, title in FAST_PACKAGES.items() if importlib.util.find_spec(name) is None]


def implementation(function: Any) -> str:
    """``module.name`` of what a transformers operation really calls: its wrappers keep that in a closure."""
    while True:
        inner = inspect.unwrap(function)
        closure = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        if "implementation" in closure:
            function = closure["implementation"]
        elif inner is not function:
            wrapped = getattr(function, "__wrapped__", inner)
            function = wrapped
        else:
            return f"{getattr(function, '__module__', '?')}.{getattr(function, '__qualname__', function)}"


def kernels_of(model: Any) -> list[str]:
    """One line a linear-attention operation: what runs it. Empty for a model without such layers."""
    layers = [m for m in model.modules() if type(m).__name__.endswith("GatedDeltaNet")]
    if not layers:
        return []
    module = sys.modules[type(layers[0]).__module__]
    lines = []
    for operation, names in _LINEAR_OPERATIONS.items():
        # Older releases keep the choice on the layer, newer ones in the module's function.
        found = next((getattr(layers[0], n) for n in names if callable(getattr(layers[0], n, None))), None)
        found = found or next((getattr(module, n) for n in names if callable(getattr(module, n, None))), None)
        lines.append(f"{operation}: {implementation(found) if found else 'unknown'}")
    return lines


class _Fallbacks(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        line = " ".join(record.getMessage().split())
        if any(words in line for words in _FALLBACK_WORDS) and line not in self.lines:
            self.lines.append(line)


@contextmanager
def heard_fallbacks() -> Iterator[list[str]]:
    """Lines with which transformers says that it took a slow path."""
    handler, logger = _Fallbacks(), logging.getLogger("transformers")
    logger.addHandler(handler)
    try:
        yield handler.lines
    finally:
        logger.removeHandler(handler)


def main(job_file: str) -> None:
    """Read ``{target, dtype, device, hide, texts, out}``; write ``out`` (states) and ``out``.json (what ran)."""
    job = json.loads(Path(job_file).read_text())
    if job["hide"]:
        hide_fast_packages()
    import torch
    from safetensors.torch import save_file

    from sglang_dflash.cpu.stand_in import declare_torchvision_ops

    if job["device"] == "cpu":
        declare_torchvision_ops()
    from transformers import AutoModelForCausalLM

    # Inference only: grads would keep every activation.
    torch.set_grad_enabled(False)
    with heard_fallbacks() as fallbacks:
        model = AutoModelForCausalLM.from_pretrained(job["target"], dtype=getattr(torch, job["dtype"]))
        model = model.to(job["device"]).eval()
        final: list[Any] = []
        _final_norm(model).register_forward_pre_hook(lambda _module, args: final.append(args[0]))
        tensors = {}
        for i, text in enumerate(job["texts"]):
            final.clear()
            out = model(torch.tensor([text], device=job["device"]), use_cache=False, output_hidden_states=True)
            # hidden_states[k + 1] is layer k's output, but for the last, which transformers gives after the final norm.
            states = [*out.hidden_states[1:-1], final[-1]]
            tensors[f"{i}"] = torch.stack([s[0] for s in states]).cpu().contiguous()
        kernels = kernels_of(model)
    save_file(tensors, job["out"])
    Path(job["out"] + ".json").write_text(json.dumps({"kernels": kernels, "fallbacks": fallbacks}))


def _final_norm(model: Any) -> Any:
    """The norm before the head."""
    inner = model.get_decoder() if hasattr(model, "get_decoder") else model.model
    return getattr(inner, "norm", None) or inner.language_model.norm


if __name__ == "__main__":
    main(sys.argv[1])

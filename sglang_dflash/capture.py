"""Capture: write the context features of chosen requests to files, for the trainer.

What is written is the very tensor that the worker hands to its drafter in prefill, so training and serving cannot see
different hidden states. Off unless the server was started with ``SGLANG_DFLASH_CAPTURE=FOLDER``; then requests whose
rid begins with ``capture:`` are captured and all others are served as ever. A client can neither switch it on nor
choose a path: a file's name is a hash of the rid.

One file a request, ``FOLDER/<sha256(rid)[:32]>.safetensors``, complete or absent (a temporary name, then a rename):
``token_ids [S]`` int32, ``features [S, K*H]`` in the server's dtype, and under ``SGLANG_DFLASH_CAPTURE_FINAL=1`` also
``final [S, H]``, the last layer's output before the final norm. Its metadata: ``rid``, ``length``, ``layer_ids`` and
the server's ``fingerprint`` (JSON). The answer may reach the client before the file does: wait for it. Where a request
could not be written there is a ``.error`` file of that name instead, with one line (empty: the disk did not even take
the line, see the log). A refused or aborted request leaves nothing.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_dflash.config import SettingError

if TYPE_CHECKING:
    from sglang_dflash.capture_tee import CaptureTee
    from sglang_dflash.provenance import Fingerprint

logger = logging.getLogger(__name__)

FOLDER, FINAL = "SGLANG_DFLASH_CAPTURE", "SGLANG_DFLASH_CAPTURE_FINAL"
PREFIX = "capture:"


def file_stem(rid: str) -> str:
    """The file name, without its suffix, of the request ``rid``."""
    return hashlib.sha256(rid.encode(errors="surrogatepass")).hexdigest()[:32]


def capture_folder() -> Path | None:
    """The folder this server was told to capture into, or None. Raises SettingError if it cannot be written."""
    value = os.environ.get(FOLDER)
    if not value:
        return None
    folder = Path(value)
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        found = "a folder that cannot be written" if folder.is_dir() else "no such folder"
        raise SettingError(f"{FOLDER}={value}: found {found}, want a writable folder; create it, or unset {FOLDER}.")
    return folder.resolve()


def wants_final() -> bool:
    """Whether the last layer's output is wanted too. Raises SettingError on a value that says neither."""
    value = os.environ.get(FINAL) or "0"
    if value not in ("0", "1"):
        raise SettingError(f"{FINAL}: found {value!r}, want 0 or 1; correct it.")
    return value == "1"


def check_capture(cfg: Any, *, tree: bool) -> None:
    """Raise SettingError for a capturing server that would lose data. ``cfg``: the resolved arguments."""
    if capture_folder() is None:
        return
    if not tree:
        raise SettingError(
            f"{FOLDER}: found a server without DDTree, want one: the tee is in its worker; serve with "
            "--speculative-algorithm DFLASH and --speculative-ddtree-topk above 1, or unset it."
        )
    if not cfg.disable_radix_cache:
        raise SettingError(
            f"{FOLDER} with the radix cache: found it on, want it off: a cached prefix has no features; set "
            "--disable-radix-cache."
        )
    backend = cfg.cuda_graph_config.prefill.backend
    if wants_final() and backend != "disabled":
        raise SettingError(
            f"{FINAL}=1 with prefill CUDA graphs ({backend}): want none: a graph does not run the hook; set "
            "--disable-prefill-cuda-graph."
        )


def start_capture(cfg: Any, model: Any, fingerprint: Callable[[], Fingerprint]) -> CaptureTee | None:
    """The tee of this server, or None when it does not capture. ``cfg``: resolved arguments that passed
    ``check_capture``; ``fingerprint``: of the server. Raises SettingError."""
    folder = capture_folder()
    if folder is None:
        return None
    from sglang_dflash.capture_tee import CaptureTee, FinalHidden  # needs torch; a client of this module does not

    final = None
    if wants_final():
        try:
            final = FinalHidden(model.get_submodule("model.norm"))
        except AttributeError:
            raise SettingError(
                f"{FINAL}=1: found no final norm at model.norm in {type(model).__name__}, want one; unset it."
            ) from None
    about = fingerprint().to_json()
    metadata = {"fingerprint": json.dumps(about, sort_keys=True), "layer_ids": json.dumps(about["layer_ids"])}
    logger.info("Capture: requests whose rid begins with %r are written to %s.", PREFIX, folder)
    graphs = cfg.cuda_graph_config.prefill.backend != "disabled"
    return CaptureTee(folder, metadata=metadata, final=final, graphs=graphs)

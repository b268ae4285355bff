"""Capture: write the context features of chosen requests to files, for the trainer.

What is written is the very tensor that the worker hands to its drafter in prefill, so training and serving cannot see
different hidden states. Off unless the server was started with ``SGLANG_DFLASH_CAPTURE=FOLDER``; then requests whose
rid begins with ``capture:`` are captured and all others are served as ever. A client can neither switch it on nor
choose a path: a file's name is a hash of the rid.

One file a request, ``FOLDER/<sha256(rid)[:32]>.safetensors``, complete or absent (a temporary name, then a rename):
``token_ids [S]`` int32, ``features [S, K*H]`` in the server's dtype, and under ``SGLANG_DFLASH_CAPTURE_FINAL=1`` also
``final [S, H]``, the last layer's output before the final norm. Where a request could not be written there is a
``.error`` file of that name instead, with one line.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import queue
import shutil
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sglang_dflash.config import SettingError

logger = logging.getLogger(__name__)

FOLDER, FINAL = "SGLANG_DFLASH_CAPTURE", "SGLANG_DFLASH_CAPTURE_FINAL"
PREFIX = "capture:"
_IN_FLIGHT = 4 << 30  # host bytes between the device and the disk; past them the scheduler waits
_SPARE = 1 << 30  # bytes that stay free on the disk


def file_stem(rid: str) -> str:
    """The file name, without its suffix, of the request ``rid``."""
    return hashlib.sha256(rid.encode()).hexdigest()[:32]


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


@dataclass(frozen=True)
class _Chunk:
    """One request's share of one prefill pass, on its way to the host."""

    rid: str
    start: int  # tokens of the request before this chunk
    token_ids: list[int]
    parts: dict[str, Tensor]  # host tensors [n, width], complete once ``ready`` has passed
    ready: Any  # a CUDA event, or None on the CPU
    last: bool
    size: int


@dataclass
class _Growing:
    """Chunks of a request so far. ``request`` dies or finishes when SGLang lets go of it."""

    request: weakref.ref[Any]
    token_ids: list[int] = field(default_factory=list)
    parts: list[dict[str, Tensor]] = field(default_factory=list)


class CaptureTee:
    """Takes prefill chunks on the scheduler's thread and writes whole requests on one of its own.

    The scheduler's thread never waits for the device: copies run on a side stream behind the pass that made the tensor,
    into pinned memory. It waits for the disk only when more than a few GiB are in flight.
    """

    def __init__(self, folder: Path, *, metadata: dict[str, str], limit: int = _IN_FLIGHT):
        self.folder, self.metadata, self.limit = folder, metadata, limit
        self._growing: dict[str, _Growing] = {}
        self._queue: queue.Queue[_Chunk] = queue.Queue()
        self._in_flight = 0
        self._room = threading.Condition()
        self._stream: Any = None
        threading.Thread(target=self._write_forever, name="dflash-capture", daemon=True).start()

    def take(self, batch: Any, features: Tensor, final: Tensor | None) -> None:
        """Note the captured requests of a prefill ``batch``: ``features [tokens, K*H]``, ``final [tokens, H]``."""
        at = 0
        for request, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            rows = slice(at, at + length)
            at += length
            if length and isinstance(request.rid, str) and request.rid.startswith(PREFIX):
                self._take_one(request, int(start), int(length), features[rows], None if final is None else final[rows])
        self._forget_dropped()

    def _take_one(self, request: Any, start: int, length: int, features: Tensor, final: Tensor | None) -> None:
        rid, prompt = request.rid, request.origin_input_ids
        growing = self._growing.get(rid)
        if start == 0:  # also a request that was retracted and begins again
            growing = self._growing[rid] = _Growing(weakref.ref(request))
        if growing is None or start != len(growing.token_ids):
            have = 0 if growing is None else len(growing.token_ids)
            self._growing.pop(rid, None)
            self._fail(rid, f"prefill began at token {start} where {have} were captured: run without a prefix cache")
            return
        tensors = {"features": features} if final is None else {"features": features, "final": final}
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        with self._room:
            self._room.wait_for(lambda: self._in_flight == 0 or self._in_flight + size <= self.limit)
            self._in_flight += size
        parts, ready = self._to_host(tensors)
        token_ids = list(prompt[start : start + length])
        growing.token_ids += token_ids
        last = start + length >= len(prompt)
        if last:
            del self._growing[rid]
        self._queue.put(_Chunk(rid, start, token_ids, parts, ready, last, size))

    def _to_host(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        if not next(iter(tensors.values())).is_cuda:
            return {name: t.clone() for name, t in tensors.items()}, None
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        parts = {}
        with torch.cuda.stream(self._stream):
            for name, t in tensors.items():
                host = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
                host.copy_(t, non_blocking=True)
                t.record_stream(self._stream)
                parts[name] = host
            ready = torch.cuda.Event()
            ready.record(self._stream)
        return parts, ready

    def _forget_dropped(self) -> None:
        """An aborted request never sends its last chunk."""
        for rid, growing in list(self._growing.items()):
            request = growing.request()
            if request is None or request.finished():
                del self._growing[rid]
                self._queue.put(_Chunk(rid, -1, [], {}, None, True, 0))

    # ---- the writer's thread -------------------------------------------------------------------

    def _write_forever(self) -> None:
        held: dict[str, list[_Chunk]] = {}
        while True:
            chunk = self._queue.get()
            try:
                self._write_chunk(chunk, held)
            except Exception as error:  # the thread must live, and the client must hear of it
                held.pop(chunk.rid, None)
                self._fail(chunk.rid, f"{type(error).__name__}: {error}")
            finally:
                with self._room:
                    self._in_flight -= chunk.size
                    self._room.notify()

    def _write_chunk(self, chunk: _Chunk, held: dict[str, list[_Chunk]]) -> None:
        if chunk.start <= 0:
            held.pop(chunk.rid, None)
        if chunk.start < 0:
            return
        if chunk.ready is not None:
            chunk.ready.synchronize()
        chunks = held.setdefault(chunk.rid, [])
        chunks.append(chunk)
        if chunk.last:
            del held[chunk.rid]
            self._write(chunk.rid, chunks)

    def _write(self, rid: str, chunks: list[_Chunk]) -> None:
        tensors = {name: torch.cat([c.parts[name] for c in chunks]) for name in chunks[0].parts}
        token_ids = [t for c in chunks for t in c.token_ids]
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        free = shutil.disk_usage(self.folder).free
        if free < size + min(_SPARE, size):
            raise OSError(f"{self.folder}: found {free} bytes free, want {size} and some to spare")
        tensors["token_ids"] = torch.tensor(token_ids, dtype=torch.int32)
        final_path = self.folder / f"{file_stem(rid)}.safetensors"
        part = final_path.with_suffix(".part")
        try:
            save_file(tensors, part, metadata=self.metadata | {"rid": rid, "length": str(len(token_ids))})
            os.replace(part, final_path)
        finally:
            part.unlink(missing_ok=True)

    def _fail(self, rid: str, why: str) -> None:
        line = f"capture of {rid!r} failed: {why}"
        logger.error(line)
        try:
            (self.folder / f"{file_stem(rid)}.error").write_text(" ".join(line.split()) + "\n")
        except OSError:
            logger.exception("capture: not even the error could be written")


class FinalHidden:
    """The last layer's output before the final norm, of the prefill pass that is running.

    A forward pre-hook on the target's final norm; it looks only while ``armed``, so decode graphs are captured
    without it.
    """

    def __init__(self, final_norm: torch.nn.Module):
        self.value: Tensor | None = None
        self.armed = False
        final_norm.register_forward_pre_hook(self._see)

    def _see(self, _module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if self.armed:
            hidden, residual = args[0], args[1] if len(args) > 1 else None
            # The norm adds and overwrites in place: take the sum before it does.
            self.value = hidden + residual if residual is not None else hidden.clone()


def start_capture(server_args: Any, model: torch.nn.Module, fingerprint: dict[str, Any], layer_ids: list[int]) -> Any:
    """The tee of this server, or None when it does not capture. Raises SettingError for settings that would lose data.

    ``server_args`` is the resolved view. Returns ``(CaptureTee, FinalHidden | None)`` or None.
    """
    folder = capture_folder()
    if folder is None:
        return None
    if not server_args.disable_radix_cache:
        raise SettingError(
            f"{FOLDER} with the radix cache: found it on, want it off: a cached prefix has no features; set "
            "--disable-radix-cache."
        )
    final = None
    if os.environ.get(FINAL) == "1":
        backend = server_args.cuda_graph_config.prefill.backend
        if backend != "disabled":
            raise SettingError(
                f"{FINAL}=1 with prefill CUDA graphs ({backend}): want none: a graph does not run the hook; set "
                "--disable-prefill-cuda-graph."
            )
        final = FinalHidden(model.get_submodule("model").get_submodule("norm"))
    metadata = {"fingerprint": json.dumps(fingerprint, sort_keys=True), "layer_ids": json.dumps(layer_ids)}
    logger.info("Capture: requests whose rid begins with %r are written to %s.", PREFIX, folder)
    return CaptureTee(folder, metadata=metadata), final

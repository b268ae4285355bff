"""The tee: rows of captured requests from a prefill pass to files, beside the scheduler and not in its way."""

from __future__ import annotations

import itertools
import logging
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sglang_dflash.capture import FINAL, PREFIX, file_stem
from sglang_dflash.capture_file import CaptureFile

logger = logging.getLogger(__name__)

_IN_FLIGHT = 4 << 30  # host bytes between the device and the disk; past them the scheduler waits
_LOOK_S = 0.5
_STALE_S = 3600  # a part nobody has written to for so long was left by a server that died


@dataclass(frozen=True)
class _Rows:
    """One request's share of one prefill pass."""

    key: int  # of the request: a rid can come again
    request: weakref.ref[Any]
    rid: str
    prompt: Any  # all its token ids
    start: int
    rows: slice  # of the pass's tensors
    last: bool


@dataclass(frozen=True)
class _Pass:
    """A prefill pass on its way to the host."""

    requests: list[_Rows]
    tensors: dict[str, Tensor]  # on the host, [n, width], complete once ``ready`` has passed
    ready: Any  # a CUDA event, or None on the CPU
    size: int


@dataclass
class _Growing:
    """A request whose prompt is not whole yet."""

    key: int
    request: weakref.ref[Any]
    have: int = 0  # tokens


def _is_over(request: weakref.ref[Any]) -> bool:
    alive = request()
    return alive is None or bool(alive.finished())


class CaptureTee:
    """Takes prefill passes on the scheduler's thread and writes whole requests on one of its own.

    The scheduler's thread never waits for the device: copies run on a side stream behind the pass that made the tensor,
    into pinned memory. It waits for the disk only when more than a few GiB are in flight.
    """

    def __init__(
        self,
        folder: Path,
        *,
        metadata: dict[str, str],
        final: FinalHidden | None = None,
        graphs: bool = False,
        limit: int = _IN_FLIGHT,
    ):
        """``graphs``: prefill runs as CUDA graphs, whose outputs the next pass overwrites."""
        self.folder, self.metadata, self.final, self.graphs, self.limit = folder, metadata, final, graphs, limit
        self._batch: Any = None  # whose prefill is running
        self._keys = itertools.count()
        self._growing: dict[str, _Growing] = {}
        self._done: weakref.WeakSet[Any] = weakref.WeakSet()
        self._queue: queue.SimpleQueue[_Pass | Callable[[], None]] = queue.SimpleQueue()
        self._in_flight = 0
        self._room = threading.Condition()
        self._stream: Any = None
        self._files: dict[int, tuple[CaptureFile, weakref.ref[Any]]] = {}  # the writer's alone
        for part in folder.glob("*.part"):
            if time.time() - part.stat().st_mtime > _STALE_S:
                part.unlink(missing_ok=True)
        threading.Thread(target=self._write_forever, name="dflash-capture", daemon=True).start()

    @contextmanager
    def prefill(self, batch: Any) -> Iterator[None]:
        """Around the prefill of ``batch`` (a ScheduleBatch): what is taken inside belongs to its requests."""
        self._batch = batch
        if self.final is not None:
            self.final.armed = True
        try:
            yield
        finally:
            self._batch = None
            if self.final is not None:
                self.final.armed, self.final.value = False, None

    def take(self, features: Tensor) -> None:
        """The drafter's context features ``[tokens, K*H]``, rows of all requests in order; ignored outside prefill."""
        batch = self._batch
        if batch is None:
            return
        self._forget_dropped()
        at, requests = 0, []
        for request, start, length in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            captured = length and isinstance(request.rid, str) and request.rid.startswith(PREFIX)
            if captured and (rows := self._rows_of(request, int(start), slice(at, at + int(length)))) is not None:
                requests.append(rows)
            at += int(length)
        if not requests:
            return
        tensors = {"features": features[:at]}
        if self.final is not None:
            if self.final.value is None:
                raise RuntimeError(f"{FINAL}=1: the target's final norm was passed by; want it called as a module.")
            tensors["final"] = self.final.value[:at]
        for name, t in tensors.items():
            if len(t) != at:
                raise RuntimeError(f"capture: found {len(t)} rows of {name} in a prefill of {at} tokens, want all.")
        self._send(requests, tensors)

    def _rows_of(self, request: Any, start: int, rows: slice) -> _Rows | None:
        """What to write of a request's rows: None if it ends early, or begins again after all of it was taken."""
        rid, prompt = request.rid, request.origin_input_ids
        if request in self._done:  # retracted while decoding
            return None
        if request.to_finish is not None or request.finished():  # refused, or aborted: SGLang runs one more pass
            self._drop(rid)
            return None
        if start == 0:  # also a request that was retracted and begins again
            self._drop(rid)
            self._growing[rid] = _Growing(next(self._keys), weakref.ref(request))
        growing = self._growing.get(rid)
        have = 0 if growing is None else growing.have
        if growing is None or start != have:
            self._drop(rid)
            self._done.add(request)
            why = f"prefill began at token {start} where {have} were captured: run without a prefix cache"
            self._queue.put(lambda: self._fail(rid, why))
            return None
        growing.have = start + rows.stop - rows.start
        last = growing.have >= len(prompt)
        if last:
            del self._growing[rid]
            self._done.add(request)
        return _Rows(growing.key, growing.request, rid, prompt, start, rows, last)

    def _forget_dropped(self) -> None:
        """An aborted request never sends its last rows."""
        for rid, growing in list(self._growing.items()):
            if _is_over(growing.request):
                self._drop(rid)

    def _drop(self, rid: str) -> None:
        growing = self._growing.pop(rid, None)
        if growing is not None:
            key = growing.key
            self._queue.put(lambda: self._discard(key))

    def _send(self, requests: list[_Rows], tensors: dict[str, Tensor]) -> None:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        with self._room:
            self._room.wait_for(lambda: self._in_flight == 0 or self._in_flight + size <= self.limit)
            self._in_flight += size
        host, ready = self._to_host(tensors)
        self._queue.put(_Pass(requests, host, ready, size))

    def _to_host(self, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        if not next(iter(tensors.values())).is_cuda:
            return {name: t.clone() for name, t in tensors.items()}, None
        if self.graphs:
            tensors = {name: t.clone() for name, t in tensors.items()}
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        host = {}
        with torch.cuda.stream(self._stream):
            for name, t in tensors.items():
                # Freed and taken again from torch's cache of pinned memory: only the first passes pay for it.
                host[name] = torch.empty(t.shape, dtype=t.dtype, pin_memory=True)
                host[name].copy_(t, non_blocking=True)
                t.record_stream(self._stream)
            ready = torch.cuda.Event(blocking=True)
            ready.record(self._stream)
        return host, ready

    # ---- the writer's thread -------------------------------------------------------------------

    def _write_forever(self) -> None:
        while True:
            try:
                # Nobody tells of an aborted request: where no prefill follows, look.
                work = self._queue.get(timeout=_LOOK_S if self._files else None)
            except queue.Empty:
                work = self._discard_dropped
            try:
                if isinstance(work, _Pass):
                    self._write_pass(work)
                else:
                    work()
            except Exception:
                logger.exception("capture: the writer goes on")
            finally:
                if isinstance(work, _Pass):
                    with self._room:
                        self._in_flight -= work.size
                        self._room.notify()
            del work  # its memory is not to be held until the next arrives

    def _write_pass(self, work: _Pass) -> None:
        for request in work.requests:
            try:
                if work.ready is not None:
                    work.ready.synchronize()
                self._write(request, {name: t[request.rows] for name, t in work.tensors.items()})
            except Exception as error:  # the thread must live, and the client must hear of it
                self._discard(request.key)
                self._fail(request.rid, f"{type(error).__name__}: {error}")

    def _write(self, request: _Rows, rows: dict[str, Tensor]) -> None:
        path = self.folder / f"{file_stem(request.rid)}.safetensors"
        if request.start == 0:
            path.with_suffix(".error").unlink(missing_ok=True)
            part = path.with_suffix(f".{os.getpid()}-{request.key}.part")
            about = self.metadata | {"rid": request.rid, "length": str(len(request.prompt))}
            self._files[request.key] = CaptureFile(part, request.prompt, rows, about), request.request
        if request.key not in self._files:  # failed before
            return
        file = self._files[request.key][0]
        file.write(request.start, rows)
        if request.last:
            file.finish(path)
            del self._files[request.key]

    def _discard(self, key: int) -> None:
        if key in self._files:
            self._files.pop(key)[0].discard()

    def _discard_dropped(self) -> None:
        over = [key for key, (_, request) in self._files.items() if _is_over(request)]
        if self._queue.empty():  # else its last rows may have come between
            for key in over:
                self._discard(key)

    def _fail(self, rid: str, why: str) -> None:
        line = " ".join(f"capture of {rid!r} failed: {why}".split())
        logger.error(line)
        file = self.folder / f"{file_stem(rid)}.error"
        part = file.with_suffix(".error.part")
        try:
            try:
                part.write_text(line + "\n")
                os.replace(part, file)
            except OSError:
                part.unlink(missing_ok=True)
                file.touch()
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

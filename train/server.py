"""The target as the trainer's data source: an SGLang engine in this process, or a running server.

Either answers many requests at once and hands the answers out as they come; `spool` captures through them.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import psutil  # type: ignore[import-untyped]
import torch

from sglang_dflash.server_process import CPU_ENVIRONMENT

from .errors import TrainError

_ALIVE_S = 1.0  # how often a waiting engine's processes are looked at


@dataclass(frozen=True)
class Request:
    """Token ids to continue. ``weight`` counts against the limit of `Engine.stream`."""

    rid: str
    tokens: list[int]
    sampling: Mapping[str, Any] = field(default_factory=dict)
    weight: int = 1


class Engine(ABC):
    """What every source can do."""

    def __init__(self, loop: asyncio.AbstractEventLoop):
        self._loop = loop

    @abstractmethod
    async def _one(self, request: Request) -> list[int]:
        """The continuation of one request. Raises TrainError."""

    @abstractmethod
    def check_alive(self) -> None:
        """Raise TrainError when no answer can come any more."""

    @abstractmethod
    def close(self) -> None:
        """Free what the engine holds."""

    def stream(self, requests: Iterable[Request], limit: int) -> Iterator[tuple[Request, list[int]]]:
        """Answers as they come, in no order. Raises TrainError.

        At most ``limit`` of weight is under way, but always one request. An answer weighs until the next is asked for:
        whoever is slow to use them slows the engine down, and no more than ``limit`` ever piles up.
        """
        todo = iter(requests)
        upcoming = next(todo, None)
        pending: dict[asyncio.Task[list[int]], Request] = {}
        ready: deque[asyncio.Task[list[int]]] = deque()
        weight = 0
        try:
            while upcoming is not None or pending:
                while upcoming is not None and (not pending or weight + upcoming.weight <= limit):
                    pending[self._loop.create_task(self._one(upcoming))] = upcoming
                    weight += upcoming.weight
                    upcoming = next(todo, None)
                # Also with an answer at hand: the requests just made must be sent.
                ready += self._loop.run_until_complete(self._wait(set(pending) - set(ready), bool(ready)))
                task = ready.popleft()
                request = pending[task]
                yield request, task.result()
                del pending[task]
                weight -= request.weight
        finally:
            for task in pending:
                task.cancel()
            if pending:
                with suppress(RuntimeError):  # the loop is closed: nothing runs any more
                    self._loop.run_until_complete(asyncio.gather(*pending, return_exceptions=True))

    async def _wait(self, tasks: set[asyncio.Task[list[int]]], have_one: bool) -> Iterable[asyncio.Task[list[int]]]:
        if have_one:
            return (await asyncio.wait(tasks, timeout=0.001))[0] if tasks else ()
        while True:
            done, _ = await asyncio.wait(tasks, timeout=_ALIVE_S, return_when=asyncio.FIRST_COMPLETED)
            if done:
                return done
            self.check_alive()


class RemoteEngine(Engine):
    """A server's URL."""

    def __init__(self, url: str):
        super().__init__(asyncio.new_event_loop())
        try:
            self._http = httpx.AsyncClient(
                base_url=url, timeout=httpx.Timeout(None, connect=30), limits=httpx.Limits(max_connections=None)
            )
        except (httpx.InvalidURL, TypeError) as e:
            raise TrainError(f"--url: found {url!r} ({e}), want a server's, as http://127.0.0.1:30000.") from e
        self._url = url

    async def _one(self, request: Request) -> list[int]:
        body = {"input_ids": request.tokens, "sampling_params": dict(request.sampling), "rid": request.rid}
        try:
            response = await self._http.post("/generate", json=body)
        except (httpx.TransportError, httpx.UnsupportedProtocol) as e:
            raise TrainError(f"{self._url}: found no answer ({type(e).__name__}), want a server there.") from e
        if response.status_code != 200:
            said = " ".join(response.text.split())[:300]
            raise TrainError(f"{self._url}/generate: found status {response.status_code}, want 200: {said}")
        return _output_ids(request, response.json())

    def check_alive(self) -> None:
        """A server that is gone shows in the requests, which then fail."""

    def close(self) -> None:
        with suppress(RuntimeError):
            self._loop.run_until_complete(self._http.aclose())
        self._loop.close()


class InProcessEngine(Engine):
    """``sglang.Engine``, whose processes end with `close` and with this process, however that ends.

    Like ``sglang.Engine.shutdown``, `close` ends all child processes of this one.
    """

    def __init__(self, settings: Mapping[str, Any], environment: Mapping[str, str]):
        """Raises TrainError, or an error of this package's, when it does not start; nothing stays running then."""
        os.environ.update(environment)  # read by SGLang at import and by its processes
        self._main = threading.current_thread() is threading.main_thread()
        self._handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGQUIT)}
        try:
            from sglang.srt.entrypoints import engine

            class Bound(engine.Engine):
                run_scheduler_process_func = staticmethod(_scheduler)
                run_detokenizer_process_func = staticmethod(_detokenizer)

            # It reports a handler of ours as an error.
            logging.getLogger(engine.__name__).addFilter(_no_handler_notice)
            self._engine = Bound(**settings, custom_sigquit_handler=_ignore)
            super().__init__(self._engine.loop)
            self._loop.run_until_complete(self._take_signals())
            self._pids = [psutil.Process(pid) for pid in self._engine.get_all_child_pids()]
        except BaseException as e:
            _end_children()
            self._give_signals()
            if not isinstance(e, Exception) or type(e).__module__.startswith("sglang_dflash."):
                raise
            why = " ".join(str(e).split())[:300]
            raise TrainError(
                f"engine of {settings.get('model_path')}: found {type(e).__name__} at its start ({why}), want it to "
                "start; its own messages are above, --engine changes its settings."
            ) from e

    async def _take_signals(self) -> None:
        """SGLang answers SIGTERM by draining requests while its loop runs, and a failed child by killing this process
        without a word. Here the first is the program's own affair, and the second ends in an error."""
        self._engine.tokenizer_manager.auto_create_handle_loop()  # binds to the running loop, and sets handlers
        if not self._main:
            return
        for number in self._handlers:
            self._loop.remove_signal_handler(number)
        signal.signal(signal.SIGTERM, self._handlers[signal.SIGTERM])
        signal.signal(signal.SIGQUIT, _ignore)

    def _give_signals(self) -> None:
        if self._main:
            for number, handler in self._handlers.items():
                signal.signal(number, handler)

    async def _one(self, request: Request) -> list[int]:
        try:
            answer = await self._engine.async_generate(
                input_ids=request.tokens, sampling_params=dict(request.sampling), rid=request.rid
            )
        except Exception as e:  # what a server would answer with status 400
            why = " ".join(str(getattr(e, "detail", None) or e).split())[:300]
            raise TrainError(f"request {request.rid!r}: found it refused ({why}), want an answer.") from e
        return _output_ids(request, answer)

    def check_alive(self) -> None:
        for process in self._pids:
            with suppress(psutil.NoSuchProcess):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    continue
            raise TrainError(
                f"engine: found its process {process.pid} dead, want it to answer; its last messages are above; run "
                "again to go on, with other --engine settings where memory ran out."
            )

    def close(self) -> None:
        try:
            self._engine.shutdown()
        finally:
            self._give_signals()


def _output_ids(request: Request, answer: Mapping[str, Any]) -> list[int]:
    """Raises TrainError where the server gave up on the request."""
    reason = (answer.get("meta_info") or {}).get("finish_reason") or {}
    if reason.get("type") == "abort":
        why = " ".join(str(reason.get("message")).split())[:300]
        raise TrainError(f"request {request.rid!r}: found it refused ({why}), want an answer.")
    return list(answer["output_ids"])


def _scheduler(*args: Any, **kwargs: Any) -> Any:
    """SGLang's process, bound to ours before it can be orphaned."""
    _end_with_parent()
    from sglang.srt.managers.scheduler import run_scheduler_process

    return run_scheduler_process(*args, **kwargs)


def _detokenizer(*args: Any, **kwargs: Any) -> Any:
    """Likewise."""
    _end_with_parent()
    from sglang.srt.managers.detokenizer_manager import run_detokenizer_process

    return run_detokenizer_process(*args, **kwargs)


def _end_with_parent() -> None:
    """SGLang's processes ask the kernel to end them with their parent, but seconds after their start: a parent that
    was killed before leaves them for ever. So look whether it is still there."""
    from sglang.srt.utils import kill_itself_when_parent_died

    kill_itself_when_parent_died()
    parent = multiprocessing.parent_process()
    if parent is None or os.getppid() != parent.pid:
        os._exit(1)


def _ignore(*_: object) -> None:
    """For SIGQUIT, by which SGLang's processes report their end to their parent."""


def _no_handler_notice(record: logging.LogRecord) -> bool:
    return "custom SIGQUIT handler" not in record.getMessage()


def _end_children() -> None:
    """As ``sglang.Engine.shutdown`` does, for an engine that never came to be."""
    children = psutil.Process().children(recursive=True)
    for child in children:
        with suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(children, timeout=30)


def engine_settings(target: str, length: int, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Settings common to answering and capture; ``extra`` are the user's and win."""
    settings: dict[str, Any] = {"model_path": target, "disable_radix_cache": True, "log_level": "error"}
    if torch.cuda.is_available():
        settings |= {"attention_backend": "triton"}
    else:
        settings |= {
            "device": "cpu",
            "dtype": "float32",
            "attention_backend": "torch_native",
            "max_running_requests": 8,
            "max_total_tokens": max(4096, 8 * (length + 64)),
            "max_mamba_cache_size": 40,
        }
    return settings | dict(extra)


def engine_environment() -> dict[str, str]:
    """What an engine needs in its environment beside what is there."""
    return {} if torch.cuda.is_available() else dict(CPU_ENVIRONMENT)


@contextmanager
def answering(target: str, length: int, url: str | None, extra: Mapping[str, Any]) -> Iterator[Engine]:
    """An engine that decodes plainly, or the server at ``url``."""
    engine: Engine = (
        RemoteEngine(url) if url else InProcessEngine(engine_settings(target, length, extra), engine_environment())
    )
    try:
        yield engine
    finally:
        engine.close()

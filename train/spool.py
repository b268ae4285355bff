"""Where captured texts pass from the server to the trainer: a folder, of memory where there is enough.

The server's tee (`sglang_dflash.capture`) writes a file a text; it is removed as it is read. What is under way is
bounded in bytes, so neither memory nor disk fills up however slow the reader is.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sglang_dflash import capture
from sglang_dflash.drafter import target_facts

from .errors import TrainError
from .probe import write_probe
from .server import Engine, InProcessEngine, RemoteEngine, Request, engine_environment, engine_settings
from .shards import check_same

MEMORY = Path("/dev/shm")
_NAME = "sglang-dflash-capture-"
_MOST = 4 << 30  # bytes of features under way
_WAIT_S = 120.0
_YOUNG_S = 60.0  # a spool may be without its lock while it is being made


class Captured:
    """What one capture brought: tensors as `sglang_dflash.capture` writes them, and the server's fingerprint."""

    def __init__(self, file: Path):
        """Raises TrainError for a file that the tee cannot have written."""
        try:
            with safe_open(str(file), framework="pt") as opened:
                about = opened.metadata()
                self.tensors: dict[str, Tensor] = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            self.fingerprint: dict[str, Any] = json.loads(about["fingerprint"])
            self.token_ids, self.features = self.tensors["token_ids"], self.tensors["features"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as e:
            raise TrainError(f"{file}: found {type(e).__name__}, want a captured text; capture again.") from e
        self.final = self.tensors.get("final")


class Spool:
    """An engine that captures, and the folder it writes to."""

    def __init__(
        self, engine: Engine, folder: Path, *, layer_ids: tuple[int, ...], row_bytes: int, final: bool, label: str
    ):
        """``row_bytes``: at most so many a token; ``label``: tells our files in a shared folder from others'."""
        self.engine, self.folder, self.row_bytes = engine, folder, row_bytes
        self.layer_ids, self.final = layer_ids, final
        self._label = hashlib.sha256(label.encode()).hexdigest()[:12]
        self._fingerprint: dict[str, Any] | None = None

    def texts(self, texts: Mapping[str, list[int]]) -> Iterator[tuple[str, Captured]]:
        """Prefill whole texts (token ids by id) and read what the server captured, as it comes; files are removed.

        Raises TrainError with the server's own reason, when nothing arrives, or when it is not what was asked for.
        """
        names = {f"{capture.PREFIX}{self._label}:{name}": name for name in texts}
        limit = max(1, min(_MOST, shutil.disk_usage(self.folder).free // 4))

        def requests() -> Iterator[Request]:
            for rid, name in names.items():
                for suffix in (".safetensors", ".error"):  # of a run that was killed
                    self._file(rid).with_suffix(suffix).unlink(missing_ok=True)
                sampling = {"temperature": 0, "max_new_tokens": 1}
                yield Request(rid, list(texts[name]), sampling, self.row_bytes * len(texts[name]))

        for request, _ in self.engine.stream(requests(), limit):
            name, file = names[request.rid], self._file(request.rid)
            self._wait_for(file, name)
            captured = Captured(file)
            file.unlink()
            self._check(name, request.tokens, captured)
            yield name, captured

    def _file(self, rid: str) -> Path:
        return self.folder / f"{capture.file_stem(rid)}.safetensors"

    def _wait_for(self, file: Path, name: str) -> None:
        """The answer may come before the file does."""
        error, deadline = file.with_suffix(".error"), time.monotonic() + _WAIT_S
        while not file.exists():
            if error.exists():
                reason = error.read_text().strip() or "the server could not write, not even why: its disk is full"
                error.unlink(missing_ok=True)
                raise TrainError(f"sample {name!r}: found {reason}; want it captured: correct that, run again.")
            self.engine.check_alive()
            if time.monotonic() > deadline:
                raise TrainError(
                    f"sample {name!r}: found nothing in {self.folder} after {_WAIT_S:.0f} s, want {file.name}; is "
                    f"that the server's {capture.FOLDER}?"
                )
            time.sleep(0.005)

    def _check(self, name: str, tokens: list[int], captured: Captured) -> None:
        if captured.token_ids.tolist() != tokens:
            raise TrainError(
                f"sample {name!r}: found other tokens than were sent, want the same; does another run write to "
                f"{self.folder}?"
            )
        found, want = tuple(captured.fingerprint["layer_ids"]), self.layer_ids
        if found != want:
            raise TrainError(
                f"server: layer_ids: found {list(found)}, want {list(want)}; start it with a drafter of those layers."
            )
        if (captured.final is not None) != self.final:
            raise TrainError(
                f"server: final hidden state: found {'one' if captured.final is not None else 'none'}, want "
                f"{'one' if self.final else 'none'}; start it with {capture.FINAL}={int(self.final)}."
            )
        if self._fingerprint is None:
            self._fingerprint = captured.fingerprint
        check_same(captured.fingerprint, self._fingerprint, "server", "as before, it was started anew in between")


def capture_row_bytes(hidden_size: int, layer_ids: tuple[int, ...], final: bool) -> int:
    """Bytes of one captured token in the widest dtype a server has, at most."""
    return 4 * (len(layer_ids) + final) * hidden_size + 4


@contextmanager
def capturing(
    target: str,
    layer_ids: tuple[int, ...],
    length: int,
    *,
    label: str,
    url: str | None = None,
    folder: Path | None = None,
    final: bool = False,
    extra: Mapping[str, Any] | None = None,
    memory_only: bool = False,
) -> Iterator[Spool]:
    """An engine that captures texts of at most ``length`` tokens, for as long as the context lasts.

    With ``url`` the server is somebody else's and ``folder`` is its ``SGLANG_DFLASH_CAPTURE``. ``memory_only``: refuse
    to spool on a disk. Raises TrainError.
    """
    facts = target_facts(target)
    row_bytes = capture_row_bytes(facts.hidden_size, layer_ids, final)
    if url:
        if folder is None or not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise TrainError(
                f"--capture-folder: found {folder}, want the folder that {url} was given as {capture.FOLDER}, writable."
            )
        remote = RemoteEngine(url)
        try:
            yield Spool(remote, folder, layer_ids=layer_ids, row_bytes=row_bytes, final=final, label=label)
        finally:
            remote.close()
        return
    with spool_folder(2 * row_bytes * length, memory_only=memory_only) as spool:
        drafter = write_probe(spool / "drafter", facts, layer_ids)
        (spool / "captured").mkdir()
        environment = engine_environment() | {capture.FOLDER: str(spool / "captured")}
        settings: dict[str, Any] = {
            "speculative_algorithm": "DFLASH",
            "speculative_draft_model_path": str(drafter),
        }
        if final:
            environment[capture.FINAL] = "1"
            settings["disable_prefill_cuda_graph"] = True
        engine: InProcessEngine | None = None
        try:
            engine = InProcessEngine(engine_settings(target, length, settings | dict(extra or {})), environment)
            yield Spool(engine, spool / "captured", layer_ids=layer_ids, row_bytes=row_bytes, final=final, label=label)
        finally:
            if engine is not None:
                engine.close()
            for name in (capture.FOLDER, capture.FINAL):
                os.environ.pop(name, None)


@contextmanager
def spool_folder(wanted: int, *, memory_only: bool) -> Iterator[Path]:
    """A folder that is gone afterwards; after a kill, when the next one is made. Raises TrainError without room."""
    places = [MEMORY] if memory_only else [MEMORY, Path(tempfile.gettempdir())]
    places = [place for place in places if place.is_dir() and os.access(place, os.W_OK)]
    for place in places:
        _remove_leftovers(place)
    free = {place: shutil.disk_usage(place).free for place in places}
    roomy = [place for place in places if free[place] >= wanted]
    if not roomy:
        found = ", ".join(f"{free[p] >> 20} MiB free in {p}" for p in places) or f"no {MEMORY}"
        raise TrainError(
            f"capture: found {found}, want {-(-wanted >> 20)} MiB; free some (docker: --shm-size), or set a smaller "
            "max_length."
        )
    folder = Path(tempfile.mkdtemp(prefix=_NAME, dir=roomy[0]))
    try:
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_leftovers(place: Path) -> None:
    """Spools of processes that were killed: nobody holds their lock. In memory they would cost it until a reboot."""
    for folder in place.glob(f"{_NAME}*"):
        with suppress(OSError):  # another user's, or in use
            if not (folder / "lock").exists():
                if time.time() - folder.stat().st_mtime > _YOUNG_S:
                    shutil.rmtree(folder)
                continue
            with (folder / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)

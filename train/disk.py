"""Files that a kill or a full disk leaves whole: written atomically, appended by whole lines, one writer at a time."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from pathlib import Path

from .errors import TrainError


def write_atomically(file: Path, text: str) -> None:
    """``text`` or the old content, never half of it. Raises TrainError where it cannot be written."""
    part = file.with_name(f"{file.name}.part")
    try:
        try:
            with part.open("w") as opened:
                opened.write(text)
                opened.flush()
                os.fsync(opened.fileno())
            os.replace(part, file)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
        sync_folder(file.parent)
    except OSError as e:
        raise unwritable(file, e) from e


def append(file: Path, text: str) -> None:
    """Append ``text``, synced, all of it or nothing. Raises TrainError where it cannot be written."""
    try:
        with file.open("ab", buffering=0) as opened:
            size = os.fstat(opened.fileno()).st_size
            try:
                data = memoryview(text.encode())
                while data:
                    data = data[opened.write(data) :]
                os.fsync(opened.fileno())
            except BaseException:
                os.ftruncate(opened.fileno(), size)
                raise
    except OSError as e:
        raise unwritable(file, e) from e


def drop_half_line(file: Path) -> None:
    """Cut a last line that was being appended when its writer died."""
    if not file.exists():
        return
    with file.open("r+b") as opened:
        text = opened.read()
        if not text.endswith(b"\n"):
            opened.truncate(text.rfind(b"\n") + 1)


def unwritable(file: Path, error: Exception) -> TrainError:
    """What went wrong while ``file`` was written, in one line."""
    free = f"; {shutil.disk_usage(file.parent).free >> 20} MiB are free there" if file.parent.is_dir() else ""
    why = " ".join(str(error).split())
    return TrainError(f"{file}: found {why}{free}, want a folder with room that can be written; make room, run again.")


def check_space(folder: Path, wanted: int) -> None:
    """Raise TrainError unless ``wanted`` bytes are free."""
    free = shutil.disk_usage(folder).free
    if free < wanted:
        raise TrainError(f"{folder}: found {free >> 20} MiB free, want {wanted >> 20} MiB; free some and run again.")


def sha256(file: Path) -> str:
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def sync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())


def sync_folder(folder: Path) -> None:
    """Make renames in ``folder`` outlive a power cut."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class Lock:
    """The only writer of a file or folder, until `release` or the end of the process, however it ends."""

    def __init__(self, path: Path, who: str):
        """``who``: what else might hold it. Raises TrainError if something does."""
        self._fd = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno == errno.EWOULDBLOCK:
                os.close(self._fd)
                raise TrainError(f"{path}: found another {who} at work in it, want one; wait for it.") from e
            # A file system without locks (some NFS): nothing to be had.

    def release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1

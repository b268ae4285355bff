"""A safetensors file that is written as its rows arrive, so that a long text is never whole in memory."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int32: "I32"}
_SPARE = 1 << 30  # bytes that stay free on the disk


class CaptureFile:
    """One text: ``token_ids [S]`` int32 and row tensors ``[S, width]``, given chunk by chunk.

    Under a temporary name until ``finish``. The lengths are known from the start, and so is the header; rows go to
    their place by plain writes, which leave Python's lock to the scheduler (``save_file`` would hold it for the whole
    file). Layout: github.com/huggingface/safetensors, README "Format".
    """

    def __init__(
        self, part: Path, token_ids: Sequence[int], rows: Mapping[str, Tensor], metadata: Mapping[str, str]
    ) -> None:
        """``rows``: the first chunk, for widths and dtypes. Raises OSError, also where the disk has no room for all."""
        ids = torch.tensor(token_ids, dtype=torch.int32)
        # Ids first: four bytes each, they keep every dtype aligned.
        shapes = {"token_ids": (ids.dtype, [len(ids)])}
        shapes |= {name: (t.dtype, [len(ids), t.shape[1]]) for name, t in rows.items()}
        header: dict[str, object] = {"__metadata__": dict(metadata)}
        offsets, end = {}, 0
        for name, (dtype, shape) in shapes.items():
            offsets[name], begin = end, end
            end += dtype.itemsize * torch.Size(shape).numel()
            header[name] = {"dtype": _DTYPES[dtype], "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        base = 8 + len(text)
        free, size = shutil.disk_usage(part.parent).free, base + end
        if free < size + min(_SPARE, size):
            raise OSError(f"{part.parent}: found {free} bytes free, want {size} and some to spare")
        self._offsets = {name: base + offset for name, offset in offsets.items()}
        self._part = part
        self._file = os.open(part, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o644)
        try:
            self._put(len(text).to_bytes(8, "little") + text, 0)
            self._put(ids.numpy().tobytes(), self._offsets["token_ids"])
        except BaseException:
            self.discard()
            raise

    def write(self, start: int, rows: Mapping[str, Tensor]) -> None:
        """Rows ``start ..`` of every row tensor: contiguous host tensors. Raises OSError."""
        for name, t in rows.items():
            width = t.shape[1] * t.element_size()
            self._put(t.view(torch.uint8).reshape(-1).numpy().data, self._offsets[name] + start * width)

    def _put(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view:  # Linux writes 2 GiB at most
            done = os.pwrite(self._file, view, offset)
            view, offset = view[done:], offset + done

    def finish(self, path: Path) -> None:
        """Give the file its name. Every row must have been written."""
        os.replace(self._part, path)  # first: if it fails, ``discard`` can still follow
        os.close(self._file)

    def discard(self) -> None:
        """Leave nothing."""
        os.close(self._file)
        self._part.unlink(missing_ok=True)

"""An engine without a model: answers and features are a function of the tokens, written as the server's tee does."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from training_data import fingerprint

from sglang_dflash import capture
from sglang_dflash.train.server import Engine, Request
from sglang_dflash.train.spool import Spool, spool_folder

WIDTH = 12


def answer_of(prompt: list[int]) -> list[int]:
    return [(sum(prompt) + 7 * i) % 250 for i in range(3 + sum(prompt) % 9)]


def features_of(tokens: list[int]) -> torch.Tensor:
    return torch.tensor(tokens)[:, None] + torch.arange(WIDTH) / 100


class FakeEngine(Engine):
    """``folder``: where requests whose rid asks for it are captured. ``bad`` changes what is written of a text."""

    def __init__(self, folder: Path | None = None, delay: float = 0.0, at_once: int = 1000, bad: Any = None):
        super().__init__(asyncio.new_event_loop())
        self.folder, self.delay, self.bad = folder, delay, bad
        self.slots = asyncio.Semaphore(at_once)
        self.running: set[str] = set()
        self.most = 0

    async def _one(self, request: Request) -> list[int]:
        self.running.add(request.rid)
        self.most = max(self.most, len(self.running))
        async with self.slots:
            await asyncio.sleep(self.delay)
            if request.rid.startswith(capture.PREFIX):
                self.capture(request)
                return [0]
            return answer_of(request.tokens)[: request.sampling["max_new_tokens"]]

    def capture(self, request: Request) -> None:
        assert self.folder is not None
        file = self.folder / f"{capture.file_stem(request.rid)}.safetensors"
        about = fingerprint(layer_ids=[1, 2])
        tensors = {
            "token_ids": torch.tensor(request.tokens, dtype=torch.int32),
            "features": features_of(request.tokens),
        }
        if self.bad is not None:
            self.bad(request, file, tensors, about)
        if not file.with_suffix(".error").exists():
            part = file.with_suffix(".part")
            save_file(tensors, part, {"fingerprint": json.dumps(about), "layer_ids": json.dumps(about["layer_ids"])})
            os.replace(part, file)

    def check_alive(self) -> None:
        """It never dies."""

    def close(self) -> None:
        self._loop.close()


def install(patch: Any, *, shard_bytes: int = 256 << 20, sync_s: float = 1.0, **fake: Any) -> None:
    """Put fakes in the place of `prepare`'s engines. ``patch(module, name, value)``."""
    from functools import partial

    from sglang_dflash.train import prepare
    from sglang_dflash.train.shards import ShardWriter

    @contextmanager
    def answering(*_: object) -> Iterator[Engine]:
        yield FakeEngine(**fake)

    @contextmanager
    def capturing(_target: str, layer_ids: tuple[int, ...], *_: object, **how: Any) -> Iterator[Spool]:
        with spool_folder(1, memory_only=False) as folder:
            engine = FakeEngine(folder, **fake)
            yield Spool(
                engine, folder, layer_ids=layer_ids, row_bytes=4 * WIDTH, final=how["final"], label=how["label"]
            )

    patch(prepare, "answering", answering)
    patch(prepare, "capturing", capturing)
    patch(prepare, "ShardWriter", partial(ShardWriter, shard_bytes=shard_bytes))
    patch(prepare, "_SYNC_S", sync_s)

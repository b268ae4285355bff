"""The tee on made-up prefill passes: batching, chunks, requests that end early or begin again, and disks that fail."""

from __future__ import annotations

import gc
import os
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from sglang_dflash import capture_file, capture_tee
from sglang_dflash.capture import FINAL, FOLDER, PREFIX, capture_folder, check_capture, file_stem, wants_final
from sglang_dflash.capture_file import CaptureFile
from sglang_dflash.capture_tee import CaptureTee, FinalHidden
from sglang_dflash.config import SettingError

WIDTH = 6


class Req:
    """As much of SGLang's Req as the tee reads."""

    def __init__(self, rid: str, length: int):
        self.rid, self.origin_input_ids = rid, array("q", range(length))
        self.to_finish: Any = None
        self.reason: Any = None

    def finished(self) -> bool:
        return self.reason is not None


def rows(request: Req, start: int, length: int) -> torch.Tensor:
    """What a request's rows are, wherever they stand in a pass."""
    seed = sum(map(ord, request.rid))
    return (torch.arange(start, start + length)[:, None] * 10.0 + torch.arange(WIDTH) + seed).bfloat16()


def run(tee: CaptureTee, *parts: tuple[Req, int, int], padding: int = 0) -> None:
    """One prefill pass of (request, start, length)."""
    batch = SimpleNamespace(
        reqs=[r for r, _, _ in parts], prefix_lens=[s for _, s, _ in parts], extend_lens=[n for _, _, n in parts]
    )
    features = torch.cat([*(rows(*part) for part in parts), torch.zeros(padding, WIDTH, dtype=torch.bfloat16)])
    with tee.prefill(batch):
        if tee.final is not None:
            tee.final._see(None, (features + 1, features + 2))
        tee.take(features)
    features.zero_()  # the next pass uses the memory again


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def settle(tee: CaptureTee) -> None:
    """Until the writer has done all that it was given."""
    done = threading.Event()
    tee._queue.put(done.set)
    assert done.wait(10)


def read(tee: CaptureTee, rid: str) -> dict[str, Any]:
    with safe_open(tee.folder / f"{file_stem(rid)}.safetensors", framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()} | {"metadata": file.metadata()}  # noqa: SIM118


def captured(tee: CaptureTee, *requests: Req) -> None:
    """Exactly these requests lie in the folder, whole."""
    settle(tee)
    assert {p.name for p in tee.folder.iterdir()} == {f"{file_stem(r.rid)}.safetensors" for r in requests}
    for request in requests:
        got = read(tee, request.rid)
        length = len(request.origin_input_ids)
        assert got["token_ids"].tolist() == list(request.origin_input_ids)
        assert got["token_ids"].dtype == torch.int32
        assert torch.equal(got["features"], rows(request, 0, length))
        assert got["features"].dtype == torch.bfloat16
        assert got["metadata"] == {"rid": request.rid, "length": str(length), "layer_ids": "[1]"}


@pytest.fixture
def tee(tmp_path: Path) -> CaptureTee:
    return CaptureTee(tmp_path, metadata={"layer_ids": "[1]"})


def req(name: str, length: int) -> Req:
    return Req(PREFIX + name, length)


def test_requests_batched_chunked_and_beside_others(tee: CaptureTee) -> None:
    a, b, c, other = req("a", 5), req("b", 9), req("c", 1), Req("chat-1", 4)
    run(tee, (other, 0, 4), (a, 0, 5), (b, 0, 3), padding=3)
    run(tee, (b, 3, 4), (c, 0, 1))
    run(tee, (b, 7, 2))
    captured(tee, a, b, c)


def test_decode_is_not_captured(tee: CaptureTee) -> None:
    tee.take(torch.ones(4, WIDTH))
    captured(tee)


def test_aborted_refused_and_vanished_requests_leave_nothing(tee: CaptureTee) -> None:
    aborted, vanishes, finishes = req("a", 9), req("v", 9), req("f", 9)
    refused = req("r", 1)
    refused.to_finish = "abort"  # SGLang prefills one token of it
    run(tee, (refused, 0, 1), (aborted, 0, 4), (vanishes, 0, 4), (finishes, 0, 4))
    settle(tee)
    assert len(list(tee.folder.glob("*.part"))) == 3
    aborted.to_finish = "abort"
    run(tee, (aborted, 4, 5))
    settle(tee)
    assert len(list(tee.folder.glob("*.part"))) == 2
    finishes.reason = "abort"
    del vanishes
    gc.collect()
    wait_for(lambda: not list(tee.folder.glob("*.part")))  # no prefill is needed
    last = req("last", 2)
    run(tee, (last, 0, 2))
    assert not tee._growing
    captured(tee, last)


def test_a_retracted_request_begins_again(tee: CaptureTee) -> None:
    a = req("a", 9)
    run(tee, (a, 0, 4))
    run(tee, (a, 0, 6))
    run(tee, (a, 6, 3))
    captured(tee, a)


def test_a_request_retracted_while_decoding_is_not_written_again(tee: CaptureTee) -> None:
    a = req("a", 4)
    run(tee, (a, 0, 4))
    captured(tee, a)
    (tee.folder / f"{file_stem(a.rid)}.safetensors").unlink()  # its client took it
    run(tee, (a, 0, 4))
    run(tee, (a, 4, 3))  # the answer so far
    captured(tee)


def test_a_rid_may_come_again(tee: CaptureTee) -> None:
    first, second = req("a", 9), req("a", 5)
    run(tee, (first, 0, 4))
    run(tee, (second, 0, 5))
    del first
    gc.collect()
    captured(tee, second)


def test_a_cached_prefix_is_an_error_the_client_sees(tee: CaptureTee) -> None:
    a = req("a", 9)
    run(tee, (a, 4, 3))
    run(tee, (a, 7, 2))
    settle(tee)
    (file,) = tee.folder.iterdir()
    assert file.name == f"{file_stem(a.rid)}.error"
    said = file.read_text()
    assert said == f"capture of {a.rid!r} failed: prefill began at token 4 where 0 were captured: run without a " \
        "prefix cache\n"  # fmt: skip
    again = req("a", 3)
    run(tee, (again, 0, 3))
    captured(tee, again)  # the old error is gone


def test_a_failing_write_leaves_an_error_and_no_half(tee: CaptureTee, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = req("a", 9), req("b", 2)
    run(tee, (a, 0, 3))
    settle(tee)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(capture_file.os, "pwrite", full)
        run(tee, (a, 3, 3))
        settle(tee)
    run(tee, (a, 6, 3), (b, 0, 2))  # the disk has room again, but a lacks rows
    settle(tee)
    assert {p.name for p in tee.folder.iterdir()} == {f"{file_stem(a.rid)}.error", f"{file_stem(b.rid)}.safetensors"}
    assert "No space left on device" in (tee.folder / f"{file_stem(a.rid)}.error").read_text()


def test_a_failing_rename_leaves_an_error_and_no_half(tee: CaptureTee) -> None:
    a = req("a", 3)
    (tee.folder / f"{file_stem(a.rid)}.safetensors" / "in the way").mkdir(parents=True)
    run(tee, (a, 0, 3))
    settle(tee)
    assert not list(tee.folder.glob("*.part"))
    assert (tee.folder / f"{file_stem(a.rid)}.error").read_text()


def test_a_disk_too_small_is_an_error_before_a_byte(tee: CaptureTee, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_file.shutil, "disk_usage", lambda _: SimpleNamespace(free=100))
    a = req("a", 9)
    run(tee, (a, 0, 9))
    settle(tee)
    (file,) = tee.folder.iterdir()
    assert "found 100 bytes free, want" in file.read_text()


def test_bytes_in_flight_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler waits for the disk; a pass larger than the limit goes alone."""
    tee = CaptureTee(tmp_path, metadata={"layer_ids": "[1]"}, limit=10 * WIDTH * 2)
    go, held = threading.Event(), []
    tee._queue.put(go.wait)  # type: ignore[arg-type]

    def passes() -> None:
        for i in range(4):
            request = req(f"{i}", 6 if i < 3 else 30)
            held.append(request)
            run(tee, (request, 0, len(request.origin_input_ids)))

    thread = threading.Thread(target=passes)
    thread.start()
    wait_for(lambda: len(held) == 2)
    time.sleep(0.05)
    assert len(held) == 2  # the second waits
    assert tee._in_flight == 6 * WIDTH * 2
    go.set()
    thread.join(10)
    captured(tee, *held)
    assert tee._in_flight == 0


def test_stale_parts_are_swept_and_fresh_ones_are_not(tmp_path: Path) -> None:
    for name, age in (("old.part", 2 * capture_tee._STALE_S), ("fresh.part", 0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    CaptureTee(tmp_path, metadata={})
    assert [p.name for p in tmp_path.iterdir()] == ["fresh.part"]


def test_final_is_the_sum_before_the_norm_and_only_in_prefill(tmp_path: Path) -> None:
    norm = torch.nn.Identity()
    tee = CaptureTee(tmp_path, metadata={"layer_ids": "[1]"}, final=FinalHidden(norm))
    a = req("a", 5)
    run(tee, (a, 0, 5), padding=2)
    settle(tee)
    got = read(tee, a.rid)
    assert set(got) == {"token_ids", "features", "final", "metadata"}
    both = rows(a, 0, 5)
    assert torch.equal(got["final"], (both + 1) + (both + 2))
    norm(torch.ones(2, WIDTH))
    assert tee.final is not None
    assert tee.final.value is None


def test_a_norm_passed_by_is_not_silent(tmp_path: Path) -> None:
    tee = CaptureTee(tmp_path, metadata={}, final=FinalHidden(torch.nn.Identity()))
    a = req("a", 5)
    batch = SimpleNamespace(reqs=[a], prefix_lens=[0], extend_lens=[5])
    with tee.prefill(batch), pytest.raises(RuntimeError, match="the target's final norm was passed by"):
        tee.take(rows(a, 0, 5))


def test_missing_rows_are_not_silent(tee: CaptureTee) -> None:
    a = req("a", 5)
    batch = SimpleNamespace(reqs=[a], prefix_lens=[0], extend_lens=[5])
    with tee.prefill(batch), pytest.raises(RuntimeError, match="found 4 rows of features in a prefill of 5 tokens"):
        tee.take(rows(a, 0, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_file_is_a_safetensors_file(tmp_path: Path, dtype: torch.dtype) -> None:
    features = torch.randn(7, 3).to(dtype)
    file = CaptureFile(tmp_path / "x.part", range(7), {"features": features[:2]}, {"rid": 'ü"\n'})
    for start, stop in ((0, 2), (2, 6), (6, 7)):
        file.write(start, {"features": features[start:stop]})
    file.finish(tmp_path / "x.safetensors")
    with safe_open(tmp_path / "x.safetensors", framework="pt") as opened:
        assert torch.equal(opened.get_tensor("features"), features)
        assert opened.get_tensor("token_ids").tolist() == list(range(7))
        assert opened.metadata() == {"rid": 'ü"\n'}


# ---- settings ------------------------------------------------------------------------------------------


def args(*, radix_off: bool = True, prefill: str = "disabled") -> Any:
    graphs = SimpleNamespace(prefill=SimpleNamespace(backend=prefill))
    return SimpleNamespace(disable_radix_cache=radix_off, cuda_graph_config=graphs)


def test_off_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FOLDER, raising=False)
    assert capture_folder() is None
    check_capture(args(radix_off=False), tree=False)
    monkeypatch.delenv(FINAL, raising=False)
    assert not wants_final()


def test_settings_that_would_lose_data_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    check_capture(args(prefill="full"), tree=True)
    with pytest.raises(SettingError, match="found a server without DDTree"):
        check_capture(args(), tree=False)
    with pytest.raises(SettingError, match="radix cache: found it on, want it off"):
        check_capture(args(radix_off=False), tree=True)
    monkeypatch.setenv(FINAL, "1")
    check_capture(args(), tree=True)
    with pytest.raises(SettingError, match=r"prefill CUDA graphs \(full\): want none"):
        check_capture(args(prefill="full"), tree=True)
    monkeypatch.setenv(FINAL, "yes")
    with pytest.raises(SettingError, match="found 'yes', want 0 or 1"):
        check_capture(args(), tree=True)


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file := tmp_path / "file").touch()
    for path in (tmp_path / "missing", file):
        monkeypatch.setenv(FOLDER, str(path))
        with pytest.raises(SettingError, match="found no such folder"):
            capture_folder()
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(SettingError, match="found a folder that cannot be written"):
        capture_folder()


@pytest.mark.parametrize("rid", ["../../x", "/etc/x", "a\x00b", "\ud800", "x" * 10_000, ""])
def test_no_rid_is_a_path(rid: str) -> None:
    stem = file_stem(PREFIX + rid)
    assert len(stem) == 32
    assert set(stem) <= set("0123456789abcdef")

"""Decode prompts on a real server, one way of decoding a server start, and count what it accepted."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from sglang_dflash import capture
from sglang_dflash.drafter import read_drafter_spec
from sglang_dflash.server_process import server_environment, serving, tail

from .errors import TrainError
from .server import RemoteEngine
from .spool import Captured, Spool, capture_row_bytes

AR, CHAIN = "ar", "chain"
TOPK = 8
MAX_BUDGET = 128
_ANSWER_S = 1800.0  # one answer, waiting for its turn included


@dataclass(frozen=True)
class Mode:
    """A way of decoding: ``ar``, ``chain``, or a tree budget in digits (with K = 8)."""

    key: str

    @property
    def title(self) -> str:
        return {AR: "AR", CHAIN: "chain"}.get(self.key, f"DDTree-{TOPK}, N={self.key}")

    @property
    def is_tree(self) -> bool:
        return self.key not in (AR, CHAIN)

    def flags(self, drafter: Path | None) -> dict[str, str]:
        """SGLang's flags for it."""
        if self.key == AR:
            return {}
        flags = {"speculative-algorithm": "dflash", "speculative-draft-model-path": str(drafter)}
        if self.key == CHAIN:
            return flags | {"speculative-eagle-topk": "1"}
        return flags | {"speculative-ddtree-topk": str(TOPK), "speculative-ddtree-budget": self.key}


def parse_modes(text: str, block_size: int) -> list[Mode]:
    """``ar,chain,15,32`` -> modes, in order and without repeats. Raises TrainError for a budget no server takes."""
    modes: dict[str, Mode] = {}
    for word in (w.strip().lower() for w in text.split(",")):
        if word in (AR, CHAIN):
            modes[word] = Mode(word)
        elif word.isdigit() and block_size - 1 <= int(word) <= MAX_BUDGET:
            modes[str(int(word))] = Mode(str(int(word)))
        else:
            raise TrainError(
                f"--budgets: found {word!r}, want ar, chain or a number in {block_size - 1} (block size - 1).."
                f"{MAX_BUDGET}; correct it."
            )
    return list(modes.values())


@dataclass(frozen=True)
class Prompt:
    """A prompt in the target's own tokens, chat template applied."""

    id: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Counts:
    """Verifies of one answer, or of many: ``histogram[n]`` verifies accepted n drafts."""

    histogram: tuple[int, ...] = ()

    @classmethod
    def of(cls, accepted: Sequence[int]) -> Counts:
        """From the accepted drafts of each verify."""
        return cls(tuple(accepted.count(n) for n in range(max(accepted, default=-1) + 1)))

    def __add__(self, other: Counts) -> Counts:
        a, b = self.histogram, other.histogram
        pad = (0,) * abs(len(a) - len(b))
        a, b = (a + pad, b) if len(a) < len(b) else (a, b + pad)
        return Counts(tuple(x + y for x, y in zip(a, b, strict=True)))

    @property
    def verifies(self) -> int:
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        return sum(n * count for n, count in enumerate(self.histogram))

    @property
    def tau(self) -> float | None:
        """Tokens committed a verify, pooled: 1 + accepted / verifies; None without a verify."""
        return 1 + self.accepted / self.verifies if self.verifies else None

    @property
    def acceptance(self) -> list[float]:
        """Share of the verifies that accepted position 1, 2, ... (and so all before it)."""
        return [sum(self.histogram[k:]) / self.verifies for k in range(1, len(self.histogram))]


def pooled(counts: Sequence[Counts]) -> Counts:
    """All verifies of all answers in one."""
    return sum(counts, Counts())


@dataclass(frozen=True)
class Answer:
    """One greedy continuation and what the server counted for it."""

    token_ids: tuple[int, ...]
    counts: Counts


@dataclass(frozen=True)
class ServedRun:
    """Answers of one server in the order of the prompts, and the seconds from the first request to the last answer."""

    answers: tuple[Answer, ...]
    seconds: float


@contextmanager
def workspace(kind: str) -> Iterator[Path]:
    """A temporary folder with ``logs`` in it. After an error only these remain, since the message names one."""
    folder = Path(tempfile.mkdtemp(prefix=f"sglang-dflash-{kind}-"))
    (folder / "logs").mkdir()
    try:
        yield folder
    except Exception:
        for child in folder.iterdir():
            if child.name != "logs":
                shutil.rmtree(child) if child.is_dir() else child.unlink()
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)


@dataclass(frozen=True)
class Serving:
    """How every server of an evaluation is started. ``extra`` are the user's own flags, which win."""

    target: str
    on_gpu: bool
    logs: Path
    concurrency: int
    tokens: int  # the longest prompt and its answer
    extra: Mapping[str, str]

    def flags(self) -> dict[str, str]:
        """What all modes share. No prefix cache: an answer must not depend on the one before it, and capture needs
        every token."""
        flags = {"model-path": self.target, "disable-radix-cache": "", "max-running-requests": str(self.concurrency)}
        if self.on_gpu:
            flags |= {"attention-backend": "triton"}  # the one that verifies trees: one arithmetic for all modes
        else:
            room = self.concurrency * (self.tokens + 3 * (MAX_BUDGET + 1))
            flags |= {
                "device": "cpu",
                "dtype": "float32",
                "attention-backend": "torch_native",
                "max-total-tokens": str(max(4096, room)),
                "max-mamba-cache-size": str(max(40, 5 * self.concurrency)),
            }
        return flags | dict(self.extra)

    @contextmanager
    def start(
        self,
        mode: Mode,
        drafter: Path | None,
        say: Callable[[str], object],
        *,
        capture_into: Path | None = None,
        final: bool = False,
    ) -> Iterator[Client]:
        """A running server. Raises ServerError if it does not come up, TrainError if it decodes another way."""
        environment = server_environment(self.on_gpu)
        flags = self.flags() | mode.flags(drafter)
        for name in (capture.FOLDER, capture.FINAL):
            environment.pop(name, None)
        if capture_into is not None:
            environment[capture.FOLDER] = str(capture_into)
        if final:
            environment[capture.FINAL] = "1"
            flags["disable-prefill-cuda-graph"] = ""
        log = self.logs / f"{mode.key}-{len(list(self.logs.iterdir()))}.log"
        with (
            serving(mode.title, flags, log=log, environment=environment, say=say) as url,
            httpx.Client(base_url=url, timeout=_ANSWER_S) as http,
            ExitStack() as stack,
        ):
            spool = None
            if capture_into is not None:
                assert drafter is not None, "AR has no drafter to capture for"
                spec = read_drafter_spec(drafter)
                ids = spec.target_layer_ids
                row_bytes = capture_row_bytes(spec.hidden_size, ids, final)
                remote = stack.enter_context(closing(RemoteEngine(url)))
                label = str(capture_into)
                spool = Spool(remote, capture_into, layer_ids=ids, row_bytes=row_bytes, final=final, label=label)
            client = Client(http, mode, log, spool)
            client.check_mode()
            yield client


class Client:
    """Requests to one running server. Errors name the server's log."""

    def __init__(self, http: httpx.Client, mode: Mode, log: Path, spool: Spool | None):
        self._http, self._mode, self._log, self._spool = http, mode, log, spool
        self.fingerprint: dict[str, Any] = {}  # of the server, once something was captured

    def check_mode(self) -> None:
        """Raise TrainError unless the server decodes as it was told to; a tree must not become a chain in silence."""
        info = self._call("GET", "/server_info")
        topk, width = info.get("speculative_eagle_topk"), info.get("speculative_num_draft_tokens")
        wanted = {AR: (None, None), CHAIN: (1, width)}.get(self._mode.key)
        if wanted is None:
            wanted = (TOPK, int(self._mode.key) + 1)
        if (topk, width) != wanted:
            raise TrainError(
                f"{self._mode.title}: found a server with topk {topk} and {width} draft tokens, want {wanted[0]} and "
                f"{wanted[1]}; do not pass speculative flags of your own; log {self._log}."
            )

    def answer(self, prompt: Prompt, max_tokens: int) -> Answer:
        """A greedy continuation of at most ``max_tokens`` tokens."""
        reply = self._generate(list(prompt.token_ids), max_tokens)
        meta = reply["meta_info"]
        verifies, accepted = meta.get("spec_verify_ct", 0), meta.get("spec_num_correct_drafts", 0)
        counts = Counts(tuple(meta.get("spec_correct_drafts_histogram") or ())) if verifies else Counts()
        if (counts.verifies, counts.accepted) != (verifies, accepted):
            raise TrainError(
                f"{self._mode.title}: prompt {prompt.id!r}: found {counts.verifies} verifies and {counts.accepted} "
                f"accepted drafts in the histogram, want {verifies} and {accepted} as in the totals; log {self._log}."
            )
        return Answer(tuple(reply["output_ids"]), counts)

    def run(self, prompts: Sequence[Prompt], max_tokens: int, at_once: int, done: Callable[[], object]) -> ServedRun:
        """All prompts, ``at_once`` at a time, after one that warms the server up; ``done`` is called an answer."""
        self.answer(prompts[0], min(8, max_tokens))

        def one(prompt: Prompt) -> Answer:
            answer = self.answer(prompt, max_tokens)
            done()
            return answer

        began = time.monotonic()
        pool = ThreadPoolExecutor(at_once)
        try:
            answers = tuple(pool.map(one, prompts))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        seconds = time.monotonic() - began
        if self._mode.key != AR and not sum(a.counts.verifies for a in answers):
            raise TrainError(
                f"{self._mode.title}: found no verify in {len(answers)} answers, want some; raise --max-tokens or "
                "give prompts that the target does not end at once."
            )
        return ServedRun(answers, seconds)

    def capture(self, texts: Mapping[str, list[int]]) -> Iterator[tuple[str, Captured]]:
        """What the server captured for whole texts (token ids by name), as it comes, in no order.

        Raises TrainError with the server's reason, or when nothing arrives.
        """
        assert self._spool is not None
        try:
            for name, captured in self._spool.texts(texts):
                self.fingerprint = captured.fingerprint
                yield name, captured
        except TrainError as error:
            raise TrainError(f"{error} Log {self._log}.") from error

    def _generate(self, token_ids: list[int], max_tokens: int, **more: Any) -> dict[str, Any]:
        body = {"input_ids": token_ids, "sampling_params": {"temperature": 0, "max_new_tokens": max_tokens}} | more
        reply: dict[str, Any] = self._call("POST", "/generate", body)
        return reply

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._http.request(method, path, json=body)
        except httpx.TransportError as e:
            last = tail(self._log, 1)
            raise TrainError(
                f"{self._mode.title}: {path}: found no answer ({type(e).__name__}), want one; log {self._log}: {last}"
            ) from e
        if response.status_code != 200:
            said = " ".join(response.text.split())[:300]
            raise TrainError(
                f"{self._mode.title}: {path}: found status {response.status_code}, want 200: {said}; log {self._log}."
            )
        value: dict[str, Any] = response.json()
        return value

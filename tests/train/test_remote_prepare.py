"""prepare through a running server's URL, and what that server feeds its target for the same prompts."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import random_pair
from harness import Server
from rich.console import Console
from safetensors import safe_open
from tokenizers import Tokenizer, processors

from sglang_dflash import capture
from sglang_dflash.drafter import target_facts
from sglang_dflash.train.answers import read_answers
from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.online import online
from sglang_dflash.train.prepare import Prepare, prepare
from sglang_dflash.train.probe import write_probe
from sglang_dflash.train.prompts import Template, read_prompts
from sglang_dflash.train.server import RemoteEngine, Request
from sglang_dflash.train.shards import Dataset

IDS, LENGTH = (1, 2), 300
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% else %}<think>\n"
    "{% endif %}{% endif %}"
)
PROMPTS: list[dict[str, Any]] = [
    {"id": "plain", "prompt": "Hi <b>there</b>\n"},
    {"id": "space", "prompt": "  é  😀 \u2028 "},
    {"id": "special", "prompt": "a<|im_end|>\n<|im_start|>system\nb"},
    {
        "id": "turns",
        "messages": [
            {"role": "system", "content": ""},
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "<think>\nx\n</think>\n\ntwo"},
            {"role": "user", "content": "three"},
        ],
    },
    {"id": "raw", "prompt": "def f(x):\n    ", "raw": True},
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a template that knows thinking, and a tokenizer that puts a token before every text, as Llama's does."""
    folder = random_pair.write(tmp_path_factory.mktemp("models"))[0]
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": THINKING}))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    first = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", first)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def served(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    work, folder = tmp_path_factory.mktemp("server"), tmp_path_factory.mktemp("captured")
    options = ("--disable-radix-cache", "--chunked-prefill-size", "64", "--disable-prefill-cuda-graph",
               "--max-mamba-cache-size", "60")  # fmt: skip
    drafter = write_probe(work / "drafter", target_facts(target), IDS)
    environment = {capture.FOLDER: str(folder), "SGLANG_MAMBA_CONV_DTYPE": "float32"}
    with Server(work, target, drafter, *options, env=environment) as server:
        yield server, folder
        server.assert_healthy()


def fed(served: tuple[Server, Path], rid: str, path: str, body: dict[str, Any]) -> list[int]:
    """The token ids that the server's worker gave its target for a request."""
    server, folder = served
    rid = capture.PREFIX + rid
    response = server.post(path, body | {"model": "default", "max_tokens": 1, "temperature": 0, "rid": rid})
    assert response.status_code == 200, response.text
    file, deadline = folder / f"{capture.file_stem(rid)}.safetensors", time.monotonic() + 60
    while not file.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with safe_open(str(file), framework="pt") as opened:
        ids = opened.get_tensor("token_ids").tolist()
    file.unlink()
    return ids


@pytest.mark.parametrize("thinking", [False, True])
def test_invariant_30_training_ids_are_serving_ids(
    served: tuple[Server, Path], target: Path, prompts: Path, thinking: bool
) -> None:
    """Read where it counts: in the features of a request to the chat endpoint, or the completion endpoint."""
    template = Template(target, thinking=thinking)
    for prompt in read_prompts(prompts):
        if prompt.raw:
            ids = fed(served, prompt.id, "/v1/completions", {"prompt": prompt.raw})
        else:
            body = {"messages": prompt.messages, "chat_template_kwargs": {"enable_thinking": thinking}}
            ids = fed(served, prompt.id, "/v1/chat/completions", body)
        assert template.tokens(prompt) == ids, prompt.id
    other = Template(target, thinking=not thinking)
    assert other.tokens(read_prompts(prompts)[0]) != template.tokens(read_prompts(prompts)[0])


def job(served: tuple[Server, Path], target: Path, prompts: Path, out: Path, **changes: Any) -> Prepare:
    server, folder = served
    known = {"layer_ids": IDS, "max_length": LENGTH, "max_new_tokens": 9, "url": server.url, "capture_folder": folder}
    return Prepare(str(target), str(prompts), out, **known | changes)


def test_prepare_through_a_url_and_online_through_the_same(
    served: tuple[Server, Path], target: Path, prompts: Path, tmp_path: Path
) -> None:
    server, folder = served
    assert prepare(job(served, target, prompts, tmp_path), Console(quiet=True)) == len(PROMPTS)
    data = {s.id: s for s in Dataset(tmp_path)}
    answers = read_answers(tmp_path)
    assert sorted(data) == sorted(line["id"] for line in PROMPTS)
    for name, sample in data.items():
        prompt = answers[name]["prompt"]
        assert (
            sample.token_ids.tolist()
            == prompt + server.generate(prompt, 9, sampling={"ignore_eos": False})["output_ids"]
        )
    assert not list(folder.iterdir())
    with online(str(target), tmp_path, IDS, url=server.url, folder=folder) as source:
        for got in source.fetch(range(len(source))):
            assert got.token_ids.tolist() == data[got.id].token_ids.tolist()
            wanted = data[got.id].features  # batched otherwise, so equal up to fp32's rounding
            assert (got.features - wanted).abs().max() < 1e-4 * wanted.abs().max()
    assert not list(folder.iterdir())


def test_servers_that_do_not_fit_are_named(
    served: tuple[Server, Path], target: Path, prompts: Path, tmp_path: Path
) -> None:
    final = "server: final hidden state: found none, want one; start it with SGLANG_DFLASH_CAPTURE_FINAL=1"
    nobody = "http://127.0.0.1:9"

    def refused(words: str, name: str, **changes: Any) -> None:
        with pytest.raises(TrainError, match=words) as error:
            prepare(job(served, target, prompts, tmp_path / name, **changes), Console(quiet=True))
        assert "\n" not in str(error.value)
        assert not list((tmp_path / name).glob("shard-*"))

    refused(r"server: layer_ids: found \[1, 2\], want \[0, 2\]", "layers", layer_ids=(0, 2))
    refused(final, "final", final=True)
    refused("--capture-folder: found None, want the folder that", "none", capture_folder=None)
    refused(rf"{nobody}: found no answer \(ConnectError\), want a server there", "nobody", url=nobody)
    refused("nonsense: found no answer", "nonsense", url="nonsense")


def test_a_request_the_server_refuses_is_named(served: tuple[Server, Path]) -> None:
    engine = RemoteEngine(served[0].url)
    long = Request("too-long", [1] * 5000, {"max_new_tokens": 1})
    with pytest.raises(TrainError, match=r"found status 400, want 200: .*5000") as error:
        list(engine.stream([long], 1))
    assert "\n" not in str(error.value)
    engine.close()

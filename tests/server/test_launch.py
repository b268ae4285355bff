"""Ways to start a tree server, and to not get one: flags, YAML, Engine, chain, SGLANG_DFLASH=off, a drifted SGLang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from cases import pair
from harness import Server, command, free_port, server_env

SERVE = (str(Path(sys.executable).with_name("sglang")), "serve")


def check_texts(server, texts):
    outputs = server.generate_all([(c.prompt, len(c.answer)) for c in texts.cases[:8]], 4)
    assert [o["output_ids"] for o in outputs] == [c.answer for c in texts.cases[:8]]
    return outputs


def shape(server):
    """Block size, candidates and verify width that the server published."""
    info = server.get("/server_info")
    names = ("dflash_block_size", "eagle_topk", "num_draft_tokens")
    return tuple(info[f"speculative_{name}"] for name in names)


def test_llama_by_sglang_serve_and_a_yaml_file(tmp_path):
    texts = pair("llama", count=8)
    options = {
        "speculative-algorithm": "dflash",  # any case
        "speculative-draft-model-path": str(texts.drafter),
        "speculative-ddtree-topk": 4,
        "speculative-ddtree-budget": 12,
    }
    file = tmp_path / "tree.yaml"
    file.write_text(yaml.safe_dump(options))
    with Server(tmp_path, texts.target, None, "--config", str(file), launcher=SERVE) as server:
        server.control(truths=texts.truths)
        assert shape(server) == (8, 4, 13)
        assert "DDTree-4: block size 8, budget 12 nodes, verify width 13" in server.log.read_text()
        server.start_trace()
        check_texts(server, texts)
        assert {len(step["parents"]) for step in server.trace()} == {13}
        server.assert_healthy()


ENGINE = """
import json, sys

if __name__ == "__main__":
    import sglang

    keywords, prompts, length = json.loads(sys.argv[1])
    engine = sglang.Engine(**keywords)
    params = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    outputs = engine.generate(input_ids=prompts, sampling_params=params)
    info = engine.get_server_info()
    engine.shutdown()
    names = ("speculative_eagle_topk", "speculative_num_draft_tokens")
    print("RESULT " + json.dumps([[o["output_ids"] for o in outputs], [info[name] for name in names]]))
"""


def test_engine_keywords_and_the_default_width(tmp_path):
    texts = pair("dense", shared=4)
    script = tmp_path / "engine.py"
    script.write_text(ENGINE)
    control = tmp_path / "control.json"
    control.write_text(json.dumps({"truths": texts.truths}))
    keywords = {
        "model_path": str(texts.target),
        "device": "cpu",
        "dtype": "float32",
        "max_total_tokens": 8192,
        "max_running_requests": 4,
        "speculative_algorithm": "DFLASH",
        "speculative_draft_model_path": str(texts.drafter),
        "speculative_ddtree_topk": 4,
    }
    cases = texts.cases[:4]
    job = json.dumps([keywords, [c.prompt for c in cases], 64])
    done = subprocess.run(
        [sys.executable, str(script), job],
        env=server_env(DDTREE_TEST_CONTROL=str(control)),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    results = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert results, done.stdout[-3000:] + done.stderr[-3000:]
    outputs, published = json.loads(results[0].removeprefix("RESULT "))
    assert outputs == [c.answer for c in cases]
    assert published == [4, 8]  # without a budget as wide as the chain


SYMBOL, RENAMED = "move_accept_tokens_to_target_kvcache", "relocate_accepted_tokens"


@pytest.fixture(scope="module")
def drifted(tmp_path_factory):
    """A folder with a copy of SGLang in which one function has another name, everywhere."""
    import importlib.util

    found = importlib.util.find_spec("sglang")
    root = Path(found.submodule_search_locations[0])
    home = tmp_path_factory.mktemp("drifted")
    edited = 0
    for folder, folders, files in os.walk(root):
        folders[:] = [name for name in folders if name != "__pycache__"]
        copy = home / "sglang" / Path(folder).relative_to(root)
        copy.mkdir(parents=True)
        for name in files:
            source = Path(folder, name)
            text = source.read_text() if name.endswith(".py") and "speculative" in folder else ""
            if SYMBOL in text or (name == "scheduler_pp_mixin.py" and SYMBOL in (text := source.read_text())):
                (copy / name).write_text(text.replace(SYMBOL, RENAMED))
                edited += 1
            else:
                (copy / name).symlink_to(source)
    assert edited >= 3
    return home


@pytest.fixture
def drifted_path(drifted):
    return f"{drifted}{os.pathsep}{server_env()['PYTHONPATH']}"


def test_a_drifted_sglang_is_refused(drifted_path, tmp_path):
    texts = pair("dense", shared=4)
    line = [*command(texts.target, texts.drafter), "--port", str(free_port()), "--speculative-ddtree-budget", "12"]
    env = server_env(PYTHONPATH=drifted_path, DDTREE_TEST_CONTROL=str(tmp_path / "control.json"))
    done = subprocess.run(line, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: sglang-dflash: DFLASH is refused")
    message = done.stdout + done.stderr
    assert f"sglang.srt.speculative.spec_utils.{SYMBOL}: {SYMBOL} not found" in message
    assert "SGLANG_DFLASH=off" in message
    assert "unrecognized arguments" not in message
    assert "Load weight" not in message


@pytest.mark.parametrize("way", ["topk-1", "off"])
def test_the_upstream_chain(tmp_path, drifted_path, way):
    """Asked for by the number of candidates, or by turning the plugin off, which also serves a drifted SGLang."""
    texts = pair("dense", shared=4)
    # Off, a flag that only a tree has is ignored, so that one command line or file serves both.
    options = ("--speculative-eagle-topk", "1") if way == "topk-1" else ("--speculative-ddtree-budget", "12")
    env = {"SGLANG_DFLASH": "off", "PYTHONPATH": drifted_path} if way == "off" else {}
    with Server(tmp_path, texts.target, texts.drafter, *options, env=env) as server:
        server.start_trace()
        outputs = check_texts(server, texts)
        assert shape(server)[1:] == (1, 8)
        assert server.trace() == []  # the tree worker never ran
        assert all(output["meta_info"]["spec_verify_ct"] > 0 for output in outputs)
        assert "DDTree-" not in server.log.read_text()
        # Stock DFLASH does not refuse what a tree refuses.
        server.generate([1, 2, 3], 4, sampling={"presence_penalty": 0.5})
        server.assert_healthy()

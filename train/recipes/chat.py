"""Short conversations made of the corpus's own documented functions, so that chat is not foreign to the target."""

from __future__ import annotations

import ast
import random
import re
import textwrap
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from .tokenizer import ADDED

Messages = list[dict[str, str]]
_SHORTEST, _LONGEST = 80, 1400  # characters of a function
_A_FILE = 4  # conversations of one file


@dataclass(frozen=True)
class Function:
    """A documented function: its first sentence, and its source with and without the docstring, not indented."""

    name: str
    arguments: tuple[str, ...]
    summary: str
    source: str
    bare: str

    @property
    def head(self) -> str:
        """The source up to its first line that ends the signature."""
        lines = self.bare.splitlines()
        end = next((i for i, line in enumerate(lines) if line.endswith(":") and "def " in "\n".join(lines[: i + 1])), 0)
        return "\n".join(lines[: end + 1])


def functions(text: str) -> list[Function]:
    """The documented functions of a Python file that are short enough for one answer."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines, found = text.splitlines(), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.end_lineno is None:
            continue
        doc, first = ast.get_docstring(node), node.body[0]
        if not doc or len(node.body) < 2 or first.end_lineno is None or node.name.startswith("test"):
            continue
        # With a decorator the function begins above its `def`.
        start = min([node.lineno, *(d.lineno for d in node.decorator_list)]) - 1
        source = textwrap.dedent("\n".join(lines[start : node.end_lineno]))
        bare = textwrap.dedent("\n".join(lines[start : first.lineno - 1] + lines[first.end_lineno : node.end_lineno]))
        summary = re.sub(r"\s+", " ", re.split(r"\n\s*\n|(?<=\.)\s", doc.strip())[0])
        if not _SHORTEST <= len(source) <= _LONGEST or not 12 <= len(summary) <= 160 or any(t in source for t in ADDED):
            continue
        arguments = tuple(a.arg for a in node.args.posonlyargs + node.args.args + node.args.kwonlyargs)
        found.append(Function(node.name, arguments, summary, source, bare))
    return found


def question_and_answer(function: Function, rng: random.Random) -> tuple[str, str]:
    """One way to ask for the function, or about it, and the answer."""
    ask = function.summary.rstrip(".")
    ask = ask[0].lower() + ask[1:]
    block = f"```python\n{function.source}\n```"
    way = rng.random()
    if way < 0.45:
        asked = rng.choice(
            (
                f"Write a Python function `{function.name}`: {ask}.",
                f"Write a Python function to {ask}." if ask.split()[0].rstrip("s") != ask.split()[0] else "",
                f"How would you write `{function.name}({', '.join(function.arguments)})` in Python? It should {ask}.",
            )
        )
        return asked or f"Write a Python function that {ask}.", block
    if way < 0.65:
        return rng.choice(("Complete this function.", "Continue:", "")) + f"\n\n{function.head}\n    ", block
    if way < 0.85:
        asked = rng.choice(("What does this function do?", "Explain this code.", "Summarize this function."))
        return f"{asked}\n\n```python\n{function.bare}\n```", function.summary
    return f"Add a docstring to this function.\n\n```python\n{function.bare}\n```", block


def thought(function: Function) -> str:
    """What to think before answering: built from the function, so that it tells something of the answer."""
    takes = ", ".join(f"`{a}`" for a in function.arguments if a not in ("self", "cls")) or "no arguments"
    return f"The function `{function.name}` takes {takes}. {function.summary.rstrip('.')}."


def conversations(path: str, text: str, rng: random.Random, thinking_share: float = 0.3) -> Iterator[Messages]:
    """Up to four conversations of a Python file; a share of the answers begins with a thought."""
    if not path.endswith(".py"):
        return
    found = functions(text)
    for function in rng.sample(found, min(_A_FILE, len(found))):
        asked, answer = question_and_answer(function, rng)
        if rng.random() < thinking_share:
            answer = f"<think>\n{thought(function)}\n</think>\n\n{answer}"
        yield [{"role": "user", "content": asked.strip("\n")}, {"role": "assistant", "content": answer}]

"""OUT/answers.jsonl: what the target answered, in tokens, a line a prompt, appended and synced."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from .disk import Lock, append, drop_half_line, unwritable
from .errors import TrainError

ANSWERS = "answers.jsonl"


def read_answers(out: Path) -> dict[str, dict[str, Any]]:
    """Answers on disk by prompt id: ``prompt`` and ``answer`` are token ids. A last line without its end, of a run that
    was killed or still runs, does not count. Raises TrainError naming the line."""
    file = out / ANSWERS
    if not file.exists():
        return {}
    answers = {}
    with file.open() as opened:
        for number, line in enumerate(opened, 1):
            if not line.endswith("\n"):
                break
            try:
                value = json.loads(line)
                good = isinstance(value["id"], str) and all(
                    isinstance(value[key], list) and all(type(i) is int for i in value[key])
                    for key in ("prompt", "answer")
                )
            except (ValueError, TypeError, KeyError):
                good = False
            if not good:
                raise TrainError(f"{file}:{number}: found no answer, want id, prompt and answer; delete the line.")
            answers[value["id"]] = value
    return answers


class AnswerFile:
    """The one writer of a folder's answers; `have` holds those that are safe."""

    def __init__(self, out: Path):
        """Raises TrainError when another run writes there."""
        self.file = out / ANSWERS
        try:
            self.file.touch()
        except OSError as e:
            raise unwritable(self.file, e) from e
        self._lock = Lock(self.file, "prepare")
        try:
            drop_half_line(self.file)
            self.have = read_answers(out)
        except BaseException:
            self._lock.release()
            raise

    def add(self, answers: Iterable[tuple[str, list[int], list[int]]]) -> None:
        """Append (id, prompt, answer), all or none. Raises TrainError when the disk is full."""
        new = {name: {"id": name, "prompt": prompt, "answer": answer} for name, prompt, answer in answers}
        if new:
            append(self.file, "".join(json.dumps(value) + "\n" for value in new.values()))
            self.have |= new

    def close(self) -> None:
        self._lock.release()

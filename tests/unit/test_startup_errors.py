"""A command line ends in one line and status 2; a program that imports SGLang gets an exception it can catch."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from sglang_dflash import startup_errors
from sglang_dflash.config import ContractError, SettingError
from sglang_dflash.drafter_config import DrafterError
from sglang_dflash.startup_errors import note_command_line, one_line_errors

OURS = (SettingError, ContractError, DrafterError)


@pytest.fixture
def command_line(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(startup_errors, "_command_line", False)
    note_command_line()
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("kind", OURS)
def test_without_a_command_line_refusals_are_exceptions(kind: type[Exception]) -> None:
    assert not startup_errors._command_line
    with pytest.raises(kind, match="want somewhere"), one_line_errors():
        raise kind("x: found a, want somewhere; fix it.")


@pytest.mark.parametrize("kind", OURS)
def test_a_command_line_ends_in_one_line(
    kind: type[Exception], command_line: None, capsys: pytest.CaptureFixture[str]
) -> None:
    upstream = logging.getLogger("sglang.test_startup_errors")
    upstream.setLevel(logging.INFO)
    assert upstream.isEnabledFor(logging.INFO)
    with pytest.raises(SystemExit) as end, one_line_errors():
        raise kind("x: found a, want somewhere; fix it.")
    assert end.value.code == 2
    assert capsys.readouterr().err == "error: x: found a, want somewhere; fix it.\n"
    assert not upstream.isEnabledFor(logging.INFO)  # its clean-up would have the last line


def test_foreign_errors_keep_their_traceback(command_line: None) -> None:
    with pytest.raises(ValueError, match="upstream's"), one_line_errors():
        raise ValueError("upstream's own")

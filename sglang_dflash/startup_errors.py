"""How a refused start ends: in one line where there is a command line, in an exception where there is none.

Imports nothing of SGLang and nothing else of this package: it must work where either of them is broken.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_command_line = False  # whether this process took its arguments from a command line


def note_command_line() -> None:
    """To be called where SGLang has parsed a command line."""
    global _command_line
    _command_line = True


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Let an error of this package end a command line with its one line and status 2, as argparse ends; others keep
    their traceback. In a process that was given no command line (``sglang.Engine``) every exception passes through."""
    try:
        yield
    except Exception as error:
        if not _command_line or not type(error).__module__.startswith(f"{__package__}."):
            raise
        print(f"error: {error}", file=sys.stderr, flush=True)
        logging.disable(logging.INFO)  # or SGLang's clean-up would have the last line
        sys.exit(2)

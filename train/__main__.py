"""`python -m sglang_dflash.train COMMAND`: see `cli`."""

import signal
import sys

from .cli import main

if __name__ == "__main__":
    # A plain kill must end the servers that a command started, as Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())

"""The drafter's trainer, installed as `sglang_dflash.train`: `python -m sglang_dflash.train --help`."""

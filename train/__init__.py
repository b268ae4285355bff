"""The drafter's trainer, installed as `sglang_dflash.train`.

Empty in this release: the trainer is not part of it yet, so there is no command to run. The package exists so
that its name and its place in the wheel are fixed: `train/` in the repository, never a top-level `train`.
"""

"""The load tester, installed as `sglang_dflash.loadtest`.

Empty in this release: the load tester is not part of it yet, so there is no command to run. The package exists so
that the name and its place in the wheel are fixed (`loadtest/` in the repository, never a top-level `loadtest`).
"""

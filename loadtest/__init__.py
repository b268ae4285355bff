"""The load tester, installed as `sglang_dflash.loadtest`.

Empty in this release: the load tester is not part of it yet, so there is no command to run. The package
exists so that its name and its place in the wheel are fixed: `loadtest/` here, never a top-level `loadtest`.
"""

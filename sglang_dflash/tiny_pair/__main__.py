"""`python -m sglang_dflash.tiny_pair`: where the pair lies."""

from sglang_dflash.tiny_pair import DRAFTER, TARGET

print(f"{TARGET}\n{DRAFTER}")

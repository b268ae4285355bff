"""How the tiny pair that ships with the package was made: corpus, tokenizer, target, prompts.

    python -m sglang_dflash.train.recipes corpus|tokenizer|pack|target|prompts --help

The drafter is then trained by the trainer itself (`python -m sglang_dflash.train`), from the server's own hidden
states. `tiny.yaml` is the recipe of the pair that ships, `tiny_cpu.yaml` the same steps at a size for a laptop.
"""

"""`python -m sglang_dflash.train.recipes`: the steps that make a tiny pair's target, one a command."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from ..errors import TrainError
from . import settings

RECIPE = Path(__file__).parent / "tiny.yaml"


def fetch(args: argparse.Namespace) -> None:
    from . import fetch

    print(f"{fetch.fetch(settings.load(args.recipe).sources, args.out)} files")


def corpus(args: argparse.Namespace) -> None:
    from . import corpus, sources

    recipe = settings.load(args.recipe)
    found = [sources.standard_library()]
    found += [sources.distribution(requirement, args.wheels) for requirement in recipe.requirements]
    manifest = corpus.build(found, recipe.held_out, args.out)
    print(json.dumps({key: manifest[key] for key in ("totals", "dropped")}, indent=1))


def tokenizer(args: argparse.Namespace) -> None:
    from . import tokenizer

    recipe = settings.load(args.recipe)
    print(f"{tokenizer.train(args.corpus, recipe.vocab_size, recipe.tokenizer_bytes, args.out):.3f} bytes a token")


def pack(args: argparse.Namespace) -> None:
    from . import pack

    print(json.dumps(pack.build(args.corpus, args.tokenizer, settings.load(args.recipe), args.out), indent=1))


def target(args: argparse.Namespace) -> None:
    from . import fit_target

    fit_target.fit(args.pack, settings.load(args.recipe), args.out, args.seconds, args.device)


def prompts(args: argparse.Namespace) -> None:
    from . import prompts

    print(json.dumps(prompts.build(args.corpus, args.tokenizer, args.train, args.test, args.out)))


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(prog="python -m sglang_dflash.train.recipes", description=__doc__)
    main.add_argument("--recipe", type=Path, default=RECIPE, help="YAML recipe (default: that of the shipped pair)")
    commands = main.add_subparsers(required=True)

    command = commands.add_parser("fetch", help="download the sources")
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=fetch)

    command = commands.add_parser("corpus", help="filter, deduplicate and split the sources' text")
    command.add_argument("--wheels", type=Path, required=True, help="folder that fetch filled")
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=corpus)

    command = commands.add_parser("tokenizer", help="train the byte-level BPE")
    command.add_argument("--corpus", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=tokenizer)

    command = commands.add_parser("pack", help="tokenise everything into a few files to carry to the GPU host")
    command.add_argument("--corpus", type=Path, required=True)
    command.add_argument("--tokenizer", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=pack)

    command = commands.add_parser("target", help="train the target for a given time")
    command.add_argument("--pack", type=Path, required=True)
    command.add_argument("--out", type=Path, required=True)
    command.add_argument("--seconds", type=float, required=True, help="of training; start-up and compilation not in it")
    command.add_argument("--device", default=None, help="cuda or cpu (default: cuda if there is one)")
    command.set_defaults(run=target)

    command = commands.add_parser("prompts", help="prompt sets for the drafter: training and held-out evaluation")
    command.add_argument("--corpus", type=Path, required=True)
    command.add_argument("--tokenizer", type=Path, required=True)
    command.add_argument("--train", type=int, required=True, help="prompts from training text")
    command.add_argument("--test", type=int, required=True, help="prompts from held-out text")
    command.add_argument("--out", type=Path, required=True)
    command.set_defaults(run=prompts)
    return main


def main() -> int:
    args = parser().parse_args()
    try:
        args.run(args)
    except TrainError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

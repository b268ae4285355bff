"""The trainer's commands. What they import costs seconds, so each imports it when it runs: ``--help`` is immediate.

An error of the user's, or of a server, is one line on stderr and exit status 2; Ctrl-C is 130.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from .served import Prompt

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Train DFlash drafters from a server's own hidden states, and measure them.",
)
# What follows a lone -- is for SGLang: `eval ... -- --tp-size 2`.
_SERVER_FLAGS = {"allow_extra_args": True}

Target = Annotated[str, typer.Option(help="The target: a Hugging Face directory, or a hub id already downloaded.")]
Thinking = Annotated[bool, typer.Option("--thinking/--no-thinking", help="The chat template's thinking switch.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Use only the first prompts.")]
Report = Annotated[Path | None, typer.Option("--out", help="Also write the figures as JSON.")]
PROMPTS = "A JSONL file (prompt or messages, optional id), or: humaneval, gsm8k."


@app.command(context_settings=_SERVER_FLAGS, epilog="After -- : settings for sglang.Engine, e.g. -- --tp-size 2")
def prepare(
    context: typer.Context,
    target: Target,
    prompts: Annotated[str, typer.Option(help=PROMPTS)],
    out: Annotated[Path, typer.Option(help="Data folder; a run that was killed goes on where it was.")],
    layer_ids: Annotated[str, typer.Option(help="Context layers, e.g. 1,16,31,46,61 (default: spread evenly).")] = "",
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of prompt and answer.")] = 4096,
    max_new_tokens: Annotated[int, typer.Option(min=1)] = 2048,
    thinking: Thinking = False,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = 1.0,
    top_k: Annotated[int, typer.Option(help="-1: all.")] = -1,
    final: Annotated[bool, typer.Option("--final", help="Also the final hidden state (for the argmax loss).")] = False,
    limit: Limit = None,
    url: Annotated[str | None, typer.Option(help="A running server instead of an engine of our own.")] = None,
    capture_folder: Annotated[Path | None, typer.Option(help="Its SGLANG_DFLASH_CAPTURE, as seen from here.")] = None,
) -> None:
    """Let the target answer prompts and capture what its drafter would have seen."""
    from .prepare import Prepare
    from .prepare import prepare as run

    sampling = {"temperature": temperature, "top_p": top_p, "top_k": top_k} if temperature else {}
    job = Prepare(
        target=target,
        prompts=prompts,
        out=out,
        layer_ids=_integers("--layer-ids", layer_ids),
        max_length=max_length,
        max_new_tokens=max_new_tokens,
        thinking=thinking,
        sampling=sampling,
        final=final,
        limit=limit,
        url=url,
        capture_folder=capture_folder,
        engine=engine_settings(context.args),
    )
    print(f"{run(job, _console())} samples in {out}")


@app.command(context_settings=_SERVER_FLAGS, epilog="After -- : settings for the engine of --online.")
def fit(
    context: typer.Context,
    target: Target,
    data: Annotated[list[Path], typer.Option(help="Data folders of prepare; several of one fingerprint.")],
    out: Annotated[Path, typer.Option(help="Run folder; a run that was killed goes on where it was.")],
    config: Annotated[Path | None, typer.Option(help="Recipe (YAML); default: the published one.")] = None,
    init: Annotated[Path | None, typer.Option(help="Start from this drafter's weights.")] = None,
    online: Annotated[bool, typer.Option("--online", help="Capture while training; only answers are read.")] = False,
    layer_ids: Annotated[str, typer.Option(help="With --online: the context layers.")] = "",
    url: Annotated[str | None, typer.Option(help="With --online: a running server.")] = None,
    capture_folder: Annotated[Path | None, typer.Option(help="Its SGLANG_DFLASH_CAPTURE, as seen from here.")] = None,
) -> None:
    """Train a drafter. Several GPUs: torchrun --nproc-per-node N -m sglang_dflash.train fit ..."""
    from .default_recipe import default_recipe
    from .fit import Fit
    from .recipe import load_recipe

    if not online and (context.args or layer_ids or url or capture_folder):
        raise typer.BadParameter("--layer-ids, --url and engine settings belong to --online; drop them, or add it.")
    recipe = load_recipe(config) if config else default_recipe(target)
    if not online:
        Fit(target, data, out, recipe, init=init, console=_console()).run()
        return
    from .default_recipe import online_layer_ids
    from .online import online as capturing

    if len(data) != 1:
        raise typer.BadParameter(f"--data: found {len(data)} folders with --online, want one.")
    ids = _integers("--layer-ids", layer_ids) or online_layer_ids(target)
    final, extra = recipe.loss == "argmax", engine_settings(context.args)
    with capturing(target, data[0], ids, url=url, folder=capture_folder, final=final, extra=extra) as source:
        Fit(target, source, out, recipe, init=init, console=_console()).run()


@app.command("eval", context_settings=_SERVER_FLAGS, epilog="After -- : flags for every server, e.g. -- --tp-size 2")
def evaluate(
    context: typer.Context,
    target: Target,
    drafter: Annotated[list[Path], typer.Option(help="Its directory; repeat to compare several.")],
    prompts: Annotated[str, typer.Option(help=PROMPTS)],
    budgets: Annotated[str | None, typer.Option(help="Of ar, chain, N,...; default: chain, B-1 and 32.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens a prompt.")] = 512,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once.")] = 8,
    thinking: Thinking = False,
    limit: Limit = None,
    out: Report = None,
) -> None:
    """tau of drafters: served at each budget, replayed offline, beside prompt lookup's."""
    from .evaluate import evaluate as run
    from .tables import show_evaluation

    flags = server_flags(context.args)
    _check_thinking(drafter, thinking)
    texts = _tokens(target, prompts, thinking, limit)
    with _progress() as step:
        report = run(
            target,
            drafter,
            texts,
            budgets=budgets,
            max_tokens=max_tokens,
            concurrency=concurrency,
            server_flags=flags,
            say=_say,
            progress=step,
        )
    show_evaluation(report, _console(stderr=False))
    _write(out, report)


@app.command()
def export(
    run: Annotated[Path, typer.Option(help="Run folder of fit.")],
    out: Annotated[Path, typer.Option(help="Drafter folder to write.")],
    fp32: Annotated[bool, typer.Option("--fp32", help="Masters as they are, not bf16.")] = False,
) -> None:
    """Write the last checkpoint of a run as a drafter in the published format."""
    import torch

    from .export import export as write

    print(write(run, out, dtype=torch.float32 if fp32 else torch.bfloat16))


@app.command("import")
def import_(
    target: Target,
    drafter: Annotated[Path, typer.Option(help="A speculators or z-lab checkpoint.")],
    out: Annotated[Path, typer.Option(help="Drafter folder to write.")],
) -> None:
    """Write another trainer's DFlash checkpoint as a drafter in the published format."""
    from .interop import import_drafter

    print(import_drafter(drafter, target, out))


@app.command(context_settings=_SERVER_FLAGS, epilog="After -- : flags for the server, e.g. -- --tp-size 2")
def parity(
    context: typer.Context,
    target: Target,
    drafter: Annotated[Path | None, typer.Option(help="Also its tau under each path's features.")] = None,
    prompts: Annotated[str | None, typer.Option(help=f"{PROMPTS} Default: four short ones.")] = None,
    max_tokens: Annotated[int, typer.Option(min=2, help="New tokens a prompt.")] = 128,
    thinking: Thinking = False,
    limit: Limit = None,
    out: Report = None,
) -> None:
    """The server's hidden states against transformers', layer by layer."""
    from .parity import parity as run
    from .tables import show_parity

    flags = server_flags(context.args)
    texts = _tokens(target, prompts, thinking, limit)
    report = run(target, texts, drafter=drafter, max_tokens=max_tokens, server_flags=flags, say=_say)
    show_parity(report, _console(stderr=False))
    _write(out, report)


def server_flags(args: Sequence[str]) -> dict[str, str]:
    """``--tp-size 2 --enable-x --y=z`` -> names without dashes to values, "" for a switch."""
    flags: dict[str, str] = {}
    name = None
    for word in args:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word[2:].partition("=")
            flags[name] = value
            name = None if equals else name
        elif name is not None:
            flags[name], name = word, None
        else:
            raise typer.BadParameter(f"found {word!r} behind --, want flags of SGLang as --name value.")
    return flags


def engine_settings(args: Sequence[str]) -> dict[str, Any]:
    """The same as ``sglang.Engine`` takes them: underscores, and numbers as numbers."""
    settings: dict[str, Any] = {}
    for name, value in server_flags(args).items():
        try:
            parsed = json.loads(value) if value else True
        except ValueError:
            parsed = value
        settings[name.replace("-", "_")] = parsed
    return settings


def _integers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in text.split(",")) if text else ()
    except ValueError as e:
        raise typer.BadParameter(f"{option}: found {text!r}, want numbers as 1,16,31.") from e


def _tokens(target: str, source: str | None, thinking: bool, limit: int | None) -> list[Prompt]:
    """Prompts in the target's tokens."""
    from .prompts import PromptText, Template, read_prompts
    from .served import Prompt

    texts = (
        read_prompts(source, limit) if source else [PromptText(f"built-in {i}", raw=t) for i, t in enumerate(_TEXTS)]
    )
    template = Template(target, thinking=thinking)
    return [Prompt(text.id, tuple(template.tokens(text))) for text in texts]


# For parity: prose, code, a list and something repetitive.
_TEXTS = (
    "The history of the lighthouse begins with fires on hilltops. Sailors who saw one knew",
    "def quicksort(items: list[int]) -> list[int]:\n    if len(items) < 2:\n        return items\n    pivot = ",
    "Planets from the Sun outwards:\n1. Mercury\n2. Venus\n3.",
    "import os\nimport sys\nimport json\nimport time\nimport",
)


def _check_thinking(drafters: Sequence[Path], thinking: bool) -> None:
    from sglang_dflash.provenance import read_provenance

    for drafter in drafters:
        trained = read_provenance(drafter)
        now = "on" if thinking else "off"
        if trained is not None and trained.thinking not in (now, "unknown"):
            _say(f"{drafter}: trained with thinking {trained.thinking}, evaluated with it {now}: expect a lower tau.")


def _console(stderr: bool = True) -> Console:
    """Progress to stderr, results to stdout; wide where nobody looks, so that no figure is cut."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, width=None if stream.isatty() else 160)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class _progress:
    """Context manager: a function that makes a bar of a title and a total, and returns what advances it."""

    def __enter__(self) -> Callable[[str, int], Callable[[], object]]:
        from rich.progress import Progress

        self._bars = Progress(console=_console())
        self._bars.start()

        def step(title: str, total: int) -> Callable[[], object]:
            bar = self._bars.add_task(title, total=total)
            return lambda: self._bars.advance(bar)

        return step

    def __exit__(self, *_: object) -> None:
        self._bars.stop()


def _write(out: Path | None, report: dict[str, Any]) -> None:
    if out is not None:
        from .disk import write_atomically

        write_atomically(out, json.dumps(report, indent=1) + "\n")


def one_line(error: BaseException) -> str:
    """An error as one line. A server's quotes the end of its log: of that only a refusal of its own is kept."""
    lines = str(error).splitlines() or [type(error).__name__]
    said = [line.removeprefix("error: ") for line in lines[1:] if line.startswith("error: ")]
    first = lines[0].removesuffix(", its end:")
    return " ".join(f"{first}: {said[-1]}".split()) if said else " ".join(first.split())


def is_user_error(error: BaseException) -> bool:
    """One that its message explains: this package's own kinds, and the file system's."""
    return isinstance(error, OSError) or type(error).__module__.startswith("sglang_dflash.")


def main(args: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    try:
        # Without standalone mode typer raises what it would print, and returns the status of --help.
        status = app(args=list(args) if args is not None else None, standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        status = 130
    except Exception as e:
        # Some releases of typer bring a click of their own, whose base class has no public name.
        usage = getattr(e, "format_message", None)
        if usage is None and not is_user_error(e):
            raise
        print(f"error: {' '.join(usage().split()) if usage else one_line(e)}", file=sys.stderr)
        return 2
    if status == 130:  # typer's own for Ctrl-C, too
        print("interrupted", file=sys.stderr)
    return int(status or 0)

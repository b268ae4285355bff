"""What the demo prints: the answers, the totals, acceptance by position as bars, and whether the texts are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from sglang_dflash.demo import Run

_LINES, _BAR = 8, 24


def printable(text: str) -> Text:
    """Text with everything but line ends that a terminal might act on escaped."""
    return Text("".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text))


def show(prompts: Sequence[str], runs: Sequence[Run], on_gpu: bool, console: Console) -> bool:
    """Print the report of ``runs``, the first of which is plain decoding; True if all wrote the same text."""
    _answers(prompts, runs, console)
    _totals(runs, console)
    _acceptance(runs, console)
    texts = [[a.text for a in run.answers] for run in runs]
    identical = all(t == texts[0] for t in texts)
    console.print("tau = tokens committed a verify, pooled over all verifies.", highlight=False)
    if not on_gpu:
        console.print(
            "tokens/s on a CPU says little: there a pass over 33 nodes costs far more than one over a single token, on "
            "a GPU about the same.",
            highlight=False,
            soft_wrap=True,
        )
    elif not identical:
        console.print(
            "The GPU runs bf16, where passes of different widths round differently: near a tie the best token may "
            "change. On a CPU the demo runs fp32.",
            highlight=False,
            soft_wrap=True,
        )
    console.print(f"text identical: [bold]{'yes' if identical else 'no'}[/]")
    return identical


def _answers(prompts: Sequence[str], runs: Sequence[Run], console: Console) -> None:
    table = Table(title="Greedy answers, plain decoding", title_justify="left", show_lines=True)
    table.add_column("prompt", overflow="fold", ratio=2)
    table.add_column("answer, its first lines", overflow="fold", ratio=3)
    table.add_column("same text")
    for i, prompt in enumerate(prompts):
        plain = runs[0].answers[i].text
        lines = plain.split("\n")
        head = "\n".join(lines[:_LINES]) + ("\n..." if len(lines) > _LINES else "")
        other = [run.name for run in runs[1:] if run.answers[i].text != plain]
        same = Text(f"NO: {', '.join(other)}", "bold red") if other else Text("yes", "green")
        table.add_row(printable(prompt), printable(head), same)
    console.print(table)


def _totals(runs: Sequence[Run], console: Console) -> None:
    count = len(runs[0].answers)
    table = Table(title=f"{count} prompts, one at a time, {runs[0].tokens} tokens", title_justify="left")
    for heading in ("", "verifies", "tau", "tokens/s", "against AR"):
        table.add_column(heading, justify="right" if heading else "left")
    for run in runs:
        verifies, tau = sum(run.histogram), run.tau
        table.add_row(
            run.name,
            str(verifies or "-"),
            "-" if tau is None else f"{tau:.3f}",
            f"{run.tokens_per_second:.1f}",
            f"{run.tokens_per_second / runs[0].tokens_per_second:.2f}x",
        )
    console.print(table)


def _acceptance(runs: Sequence[Run], console: Console) -> None:
    drafting = [run for run in runs if run.tau is not None]
    table = Table(
        title="Acceptance by position: share of the verifies that accepted it and all before it", title_justify="left"
    )
    table.add_column("position", justify="right")
    for run in drafting:
        table.add_column(run.name)
    for k in range(max(len(run.acceptance) for run in drafting)):
        shares = [run.acceptance[k] if k < len(run.acceptance) else 0.0 for run in drafting]
        table.add_row(str(k + 1), *(f"{'█' * round(_BAR * s):<{_BAR}} {s:4.0%}" for s in shares))
    console.print(table)

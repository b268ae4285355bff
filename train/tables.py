"""Reports as rich tables: the same dictionaries that ``--out`` writes as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_PROMPT_ROWS = 20


def number(value: float | None, digits: int = 3) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else f"{value:.{digits}f}"


def table(title: str, headings: Sequence[str], left: int = 1) -> Table:
    """A table whose first ``left`` columns are words and the rest figures."""
    out = Table(title=title, title_justify="left")
    for i, heading in enumerate(headings):
        out.add_column(heading, justify="left" if i < left else "right", overflow="fold")
    return out


def show_evaluation(report: dict[str, Any], console: Console) -> None:
    """tau of every drafter and mode, acceptance by position, and each prompt."""
    runs, offline = report["runs"], {o["drafter"]: o for o in report["offline"]}
    answers, names = runs[0]["answers"], _labels(report)
    wide = table(
        f"tau, greedy, pooled over {answers} prompts of at most {report['max_tokens']} new tokens",
        [
            "drafter",
            "mode",
            "tau",
            "off-loop",
            "looping",
            "replayed",
            "teacher-forced",
            "verifies",
            "tokens/s",
            "same text",
        ],
        left=2,
    )
    for run in runs:
        figures = offline.get(run["drafter"], {"decode_tau": {}, "teacher_forced_tau": {}})
        wide.add_row(
            names[run["drafter"]],
            run["title"],
            number(run["tau"]),
            number(run["tau_off_loop"]),
            number(run["tau_looping"]),
            number(figures["decode_tau"].get(run["mode"])),
            number(figures["teacher_forced_tau"].get(run["mode"])),
            str(run["verifies"] or "-"),
            number(run["tokens_per_second"], 1),
            f"{run['identical']}/{answers}",
        )
    lookup = report["lookup"]
    wide.add_row(
        "-",
        f"prompt lookup, {lookup['drafts']}",
        *(number(lookup[k]) for k in ("tau", "tau_off_loop", "tau_looping")),
        "-", "-", str(lookup["verifies"] or "-"), "-", "-",
    )  # fmt: skip
    console.print(wide)
    console.print(
        f"off-loop / looping: {answers - runs[0]['looping']} / {runs[0]['looping']} answers, by whether they end in an "
        "exact loop. replayed: the server's walk, offline, with the last verify up to the answer's end.\n"
        "teacher-forced: "
        "from every token of the answers in turn, pooled by answers. same text: compared with the first row's "
        f"answers. tokens/s: {report['concurrency']} requests at once.",
        soft_wrap=True,
        highlight=False,
    )
    _show_acceptance(report, console)
    _show_prompts(runs, names, console)


def _show_acceptance(report: dict[str, Any], console: Console) -> None:
    runs, names = [r for r in report["runs"] if r["acceptance"]], _labels(report)
    depth = max([len(r["acceptance"]) for r in runs] + [len(o["accuracy"]) for o in report["offline"]], default=0)
    wide = table(
        "Acceptance: share of verifies that accepted this position and all before it",
        ["drafter", "mode", *map(str, range(1, depth + 1))],
        left=2,
    )
    for run in runs:
        values = [number(v, 2) for v in run["acceptance"]]
        wide.add_row(names[run["drafter"]], run["title"], *values, *["0.00"] * (depth - len(values)))
    for figures in report["offline"]:
        wide.add_row(
            names[figures["drafter"]], "argmax accuracy, replayed", *(number(v, 2) for v in figures["accuracy"])
        )
    console.print(wide)
    for figures in report["offline"]:
        console.print(
            f"{names[figures['drafter']]}: top-8 streak {number(figures['top8_streak'])} (the ceiling of every "
            "width-8 tree, no tau)",
            highlight=False,
        )


def _show_prompts(runs: list[dict[str, Any]], names: dict[str | None, str], console: Console) -> None:
    drafting = [r for r in runs if r["tau"] is not None]
    if not drafting:
        return
    rows = len(drafting[0]["prompts"])
    several = len({r["drafter"] for r in drafting}) > 1
    heads = [f"{names[r['drafter']]} {r['title']}" if several else r["title"] for r in drafting]
    wide = table("tau of each prompt", ["prompt", "tokens", "loops", *heads])
    for i in range(min(rows, _PROMPT_ROWS)):
        of = [r["prompts"][i] for r in drafting]
        wide.add_row(
            escape(of[0]["id"]),
            str(of[0]["tokens"]),
            "yes" if of[0]["looping"] else "",
            *(number(p["tau"]) for p in of),
        )
    console.print(wide)
    if rows > _PROMPT_ROWS:
        console.print(f"... and {rows - _PROMPT_ROWS} more; --out FILE writes all of them.")


def _labels(report: dict[str, Any]) -> dict[str | None, str]:
    """Each drafter's folder name, or its whole path where two are called alike."""
    paths = list(dict.fromkeys(o["drafter"] for o in report["offline"]))
    names = [Path(p).name for p in paths]
    return {None: "-"} | {p: escape(n if names.count(n) == 1 else p) for p, n in zip(paths, names, strict=True)}


def show_parity(report: dict[str, Any], console: Console) -> None:
    """Layer by layer, then what ran, what is missing, and tau under each source."""
    ran = [s for s in report["sources"] if s["layers"]]
    wide = table(
        f"The server's hidden states against other paths, {report['tokens']} tokens of {report['texts']} texts, "
        f"{report['dtype']}",
        ["layer", *(f"{s['name']}: {what}" for s in ran for what in ("cosine", "mean |diff|", "max |diff|"))],
    )
    for i, layer in enumerate(report["layers"]):
        cells = []
        for source in ran:
            figures = source["layers"][i]
            cells += [f"{figures['cosine']:.6f}", f"{figures['mean']:.2e}", f"{figures['max']:.2e}"]
        wide.add_row(str(layer), *cells)
    console.print(wide)
    for source in report["sources"]:
        for line in [*source["kernels"], *source["missing"]]:
            console.print(f"{source['name']}: {line}", markup=False, highlight=False, soft_wrap=True)
    if not report["tau"]:
        return
    keys = list(next(iter(report["tau"].values())))
    taus = table(f"tau of {escape(report['drafter'])} replayed on the same texts, features of", ["source", *keys])
    for source_name, values in report["tau"].items():
        taus.add_row(source_name, *(number(values[k]) for k in keys))
    console.print(taus)

"""Tables and picture of `experiments.audit`, from its summary alone."""

import math
import pathlib
from typing import Any

from experiments._run import read_json

Rows = list[dict[str, Any]]


def _of(summary: dict[str, Any], part: str) -> Rows:
    return [row for row in summary["rows"] if row["part"] == part]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}" if value >= 10 else f"{value:.2f}"


def _pair(row: dict[str, Any], kind: str) -> str:
    if row.get(f"{kind}_claimed") is None:
        return "-"
    audited = row[f"{kind}_audited"]
    return f"{_number(row[f'{kind}_claimed'])} / {'large' if audited is None else _number(audited)}"


def _power(row: dict[str, Any]) -> str:
    power = row["power"]
    return "> 0.999" if power > 0.999 else f"{math.floor(1000 * power) / 1000:.3f}"


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    """A table in Markdown."""
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows)]


def markdown(summary: dict[str, Any]) -> str:
    """The tables, with the command that made them."""
    lines = [f"`{summary['provenance']['command']}`"]
    delta, usual, one = (summary[f"{kind}delta"] for kind in ("", "usual_", "one_run_"))
    pairs = [f"epsilon at {delta:g}", "mu", f"epsilon at {usual:g}, from mu"]
    kinds = ("epsilon", "mu", "usual_epsilon")
    for part, first, last in (
        ("mechanisms", "mechanism: claimed / audited", "exceeds the claim"),
        ("twins", "broken twin: claimed / audited", "exposed, with power"),
    ):
        rows = _of(summary, part)
        if not rows:
            continue
        cells = []
        for row in rows:
            verdict = "yes" if row["exceeds"] else "no"
            if part == "twins":
                verdict += f", {_power(row)}"
            cells.append([row["name"], *(_pair(row, kind) for kind in kinds), verdict])
        lines += ["", *_table([first, *pairs, last], cells)]
    rows = _of(summary, "training")
    if rows:
        head = [f"{summary['canaries']:,} canaries in one run: claimed / audited"]
        head += [f"epsilon at {one:g}", "right guesses", "exceeds the claim, of all runs"]
        cells = []
        for row in rows:
            event = row["epsilon_event"]
            guesses = f"{event['correct']} of {event['guesses']}"
            verdict = f"{'yes' if row['exceeds'] else 'no'}, {row['exceeding']} of "
            verdict += f"{len(row['bounds'])}"
            name = row["name"].removeprefix("one run, ") + (" (broken)" if row["broken"] else "")
            cells.append([name, _pair(row, "epsilon"), guesses, verdict])
        lines += ["", *_table(head, cells)]
    return "\n".join(lines) + "\n"


def verdict(summary: dict[str, Any]) -> dict[str, Any]:
    """What the table shows: false claims among the sound, and twins that were not exposed."""
    sound = [row for row in summary["rows"] if not _broken(row)]
    broken = [row for row in summary["rows"] if _broken(row)]
    return {
        "sound": len(sound),
        "sound_exceeding": [row["name"] for row in sound if row["exceeds"]],
        "broken": len(broken),
        "broken_not_exposed": [row["name"] for row in broken if not row["exceeds"]],
        "least_power": min((row["power"] for row in broken), default=None),
    }


def _broken(row: dict[str, Any]) -> bool:
    return row["part"] == "twins" or row.get("broken", False)


def report(summary: dict[str, Any]) -> str:
    """The report for people."""
    found = verdict(summary)
    exceeding = ", ".join(found["sound_exceeding"]) or "none"
    hidden = ", ".join(found["broken_not_exposed"]) or "none"
    lines = [
        f"Audit at {summary['confidence']:.0%} confidence over {summary['statements']} statements",
        f"  {found['sound']} sound mechanisms; above their claim: {exceeding}",
        f"  {found['broken']} broken ones; not exposed: {hidden}",
        "  twins that no attack can expose, since they harm utility only: "
        + "; ".join(f"{name} ({why})" for name, why in summary["harmless_twins"].items()),
    ]
    if summary["pending"]:
        lines.append(f"  not audited yet: {', '.join(summary['pending'])}")
    return "\n".join(lines) + "\n\n" + markdown(summary)


def brief(summary: dict[str, Any]) -> dict[str, Any]:
    """The last line of the run."""
    kept = ("part", "name", "epsilon_claimed", "epsilon_audited", "mu_claimed", "mu_audited")
    kept += ("exceeds", "power")
    rows = [{k: row[k] for k in kept if k in row} for row in summary["rows"]]
    left_out = ("rows", "provenance", "harmless_twins")
    return {k: v for k, v in summary.items() if k not in left_out} | {
        "verdict": verdict(summary),
        "rows": rows,
    }


def draw(folder: pathlib.Path):
    """Draw `audit.png` from the `summary.json` of a run folder, and from nothing else."""
    from matplotlib.figure import Figure

    summary = read_json(folder / "summary.json")
    sound = [row for row in summary["rows"] if not _broken(row)]
    broken = [row for row in summary["rows"] if _broken(row)]
    tallest = max(len(sound), len(broken), 4)
    figure = Figure(figsize=(13, 1.6 + 0.24 * tallest), layout="constrained")
    panels = figure.subplots(1, 2, squeeze=False)[0]
    for axes, rows, title in (
        (panels[0], sound, "mechanisms: no bound may pass its claim"),
        (panels[1], broken, "broken on purpose: a bound must pass the claim"),
    ):
        for place, row in enumerate(rows):
            if row.get("mu_claimed"):
                ratio = row["mu_audited"] / row["mu_claimed"]
                axes.plot(min(ratio, 5), place, "o", color="C0" if ratio <= 1 else "C3")
            ratio = row["epsilon_audited"] / row["epsilon_claimed"]
            axes.plot(min(ratio, 5), place, "|", color="C0" if ratio <= 1 else "C3", ms=9, mew=2)
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize="x-small")
        axes.invert_yaxis()
        axes.set_xlim(left=0)
        axes.set_title(title, fontsize="medium")
        axes.grid(axis="x", alpha=0.3)
    panels[0].set_xlim(0, 1.2)
    figure.supxlabel(
        f"audited / claimed (at most 5): o mu, | epsilon at {summary['delta']:g} "
        f"(one run: {summary['one_run_delta']:g})",
        fontsize="small",
    )
    figure.savefig(folder / "audit.png", dpi=130)

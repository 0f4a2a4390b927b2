"""What `experiments.speed` says about its measurements: report, README table and picture."""

import pathlib
from collections.abc import Iterator
from typing import Any

from experiments._run import read_json
from experiments._timing import ratio

BASE, OURS = "non-private", "jdp book-keeping"


def _ratios(section: dict[str, Any], base: str) -> dict[str, dict[str, float]]:
    entries = section["contestants"]
    return {name: ratio(own["times"], entries[base]["times"]) for name, own in entries.items()}


def _interval(found: dict[str, float] | None) -> str:
    if found is None:
        return "-"
    digits = 2 if found["ratio"] < 10 else 1 if found["ratio"] < 100 else 0
    values = (found["ratio"], found["low"], found["high"])
    return "{} [{}, {}]".format(*(f"{value:,.{digits}f}" for value in values))


def _mebibytes(count: float | None) -> str:
    return "-" if count is None else f"{count / 2**20:,.0f}"


def _peer(name: str) -> bool:
    return name != BASE and not name.startswith(("jdp", "its"))


def fastest_peer(entries: dict[str, Any]) -> str | None:
    """The fastest other library of a row."""
    peers = [name for name in entries if _peer(name)]
    return min(peers, key=lambda name: entries[name]["seconds"], default=None)


def _model_rows(summary: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """For each network, the ratios that the README's table shows."""
    for name, section in summary["models"].items():
        found, entries = _ratios(section, BASE), section["contestants"]
        peer = fastest_peer(entries)
        against = ratio(entries[OURS]["times"], entries[peer]["times"]) if peer else None
        yield name, {"found": found, "peer": peer, "against": against}


def _best(found: dict[str, dict[str, float]], start: str) -> str:
    """The ratio of the fastest form of one library; which form, where it has several."""
    forms = {name: own for name, own in found.items() if name.startswith(start)}
    if not forms:
        return "-"
    name = min(forms, key=lambda form: forms[form]["ratio"])
    _, _, form = name.partition("microbatch ")
    return _interval(forms[name]) + (f" ({form})" if form else "")


def _table(head: list[str], rows: list[list[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _opacus_cells(summary: dict[str, Any], name: str) -> list[str]:
    section = summary["opacus"].get(name)
    if section is None:
        return []
    found = _ratios(section, BASE)
    cells = []
    for mode in ("hooks", "ghost"):
        own = section["contestants"].get(mode)
        cells.append("-" if own is None else f"{_interval(found[mode])} ({_ms(own)})")
    return [*cells, _ms(section["contestants"][BASE])]


def _ms(own: dict[str, Any]) -> str:
    return f"{1e3 * own['seconds']:,.{1 if own['seconds'] < 0.1 else 0}f} ms"


def _stages(summary: dict[str, Any]) -> list[str]:
    """Where a private step's time goes: each stage is what it adds to the one before."""
    rows = []
    for name, section in summary["models"].items():
        found = _ratios(section, BASE)
        if "its norms" not in found:
            continue
        forward, norms, total, rest = (
            found[f"its {stage}"]["ratio"]
            for stage in ("forward pass", "norms", "clipped sum", "noise and update")
        )
        parts = (forward, norms - forward, total - norms, rest)
        rows.append([name, *(f"{part:.2f}" for part in parts)])
    head = ["part of the non-private step", "forward", "backward and norms", "weighted sums"]
    return _table([*head, "noise and update"], rows) if rows else []


def markdown(summary: dict[str, Any]) -> str:
    """The tables for README.md."""
    lines = [f"`{summary['provenance']['command']}`", ""]
    for later in summary.get("measured_again", []):
        lines += [f"{later['what']}: `{later['provenance']['command']}`", ""]
    lines += [f"{summary['machine']}.", ""]
    rows = []
    for name, row in _model_rows(summary):
        section, found = summary["models"][name], row["found"]
        ours = found[OURS]
        keys = ("its clipped sum", "jdp vmap", "jdp scan")
        others = [_interval(found.get(key)) for key in keys]
        peers = [_best(found, start) for start in ("optax", "jax-privacy")]
        times = _ms(section["contestants"][BASE])
        batch = section["batch_size"]
        title = f"{section['title']}; batch {batch}"
        rows.append([title, f"**{_interval(ours)}**", *others, *peers, times])
    head = ["network", "jdp", "its clipped sum", "jdp vmap", "jdp scan", "optax.contrib"]
    head += ["jax-privacy"]
    if rows:
        lines += [*_table([*head, "non-private step"], rows), "", *_stages(summary), ""]
    if summary["opacus"]:
        rows = []
        for name, section in summary["opacus"].items():
            ours = summary["models"].get(name, {}).get("contestants")
            own = "-"
            if ours:
                own = f"{_interval(ratio(ours[OURS]['times'], ours[BASE]['times']))} "
                own += f"({_ms(ours[OURS])})"
            rows.append([section["title"], own, *_opacus_cells(summary, name)])
        head = ["network", "jdp", "Opacus, hooks", "Opacus, ghost", "non-private step, PyTorch"]
        lines += [*_table(head, rows), ""]
    for name, section in summary["gep"].items():
        plain = "dp-sgd, book-keeping"
        found, against = _ratios(section, plain), _ratios(section, "dp-sgd, vmap")
        rows = [
            [key, _interval(found[key]), _interval(against[key]), _ms(own)]
            for key, own in section["contestants"].items()
        ]
        what = f"{name}; batch {section['batch_size']:,}, {section['anchors']:,} anchors, "
        what += f"rank {section['rank']}, refreshed every {section['refresh_every']} steps"
        head = [what, "over dp-sgd, book-keeping", "over dp-sgd, vmap", "a step"]
        lines += [*_table(head, rows), ""]
    if summary["scaling"]:
        rows = []
        for name, section in summary["scaling"].items():
            found, entries = _ratios(section, BASE), section["contestants"]
            memory = [_mebibytes(entries[key]["temporary_bytes"]) for key in (BASE, OURS)]
            cells = [_interval(found.get(key)) for key in (OURS, "jdp vmap")]
            rows.append([f"{section['title']}; {name}", f"{section['floats']:,}", *cells, *memory])
        head = ["network", "parameters", "jdp", "jdp vmap", "MiB, non-private", "MiB, jdp"]
        lines += _table(head, rows)
    return "\n".join(lines).rstrip("\n") + "\n"


def report(summary: dict[str, Any]) -> str:
    """Everything that was measured, for people."""
    lines = [summary["machine"], "ratio: median over rounds, [95% bootstrap interval]"]
    for later in summary.get("measured_again", []):
        lines.append(f"{later['what']}: {later['provenance']['command']}")
    lines.append("")
    for part in ("models", "opacus", "gep", "scaling"):
        for name, section in summary[part].items():
            base = "dp-sgd, book-keeping" if part == "gep" else BASE
            found = _ratios(section, base)
            lines.append(f"== {part}: {name} ({section.get('title', section.get('model'))}) ==")
            lines.append(
                f"{'':<34}{'over ' + base:<28}{'a step':>12}{'MiB':>10}{'compile':>10}{'rounds':>8}"
            )
            for key, own in section["contestants"].items():
                memory = _mebibytes(own.get("temporary_bytes"))
                compiled = own.get("compile_seconds")
                lines.append(
                    f"{key:<34}{_interval(found[key]):<28}{_ms(own):>12}{memory:>10}"
                    + (f"{compiled:>8.1f} s" if compiled is not None else f"{'-':>10}")
                    + f"{sum(t is not None for t in own['times']):>8}"
                )
            for key, why in section.get("left_out", {}).items():
                lines.append(f"{key:<34}left out: {why}")
            peer = fastest_peer(section["contestants"]) if part == "models" else None
            if peer:
                own, other = (section["contestants"][key]["times"] for key in (OURS, peer))
                lines.append(f"jdp over the fastest peer, {peer}: {_interval(ratio(own, other))}")
            lines.append("")
    return "\n".join(lines)


def brief(summary: dict[str, Any]) -> dict[str, Any]:
    """The last line: ratios alone."""
    result: dict[str, Any] = {"machine": summary["machine"]}
    for part in ("models", "opacus", "gep", "scaling"):
        base = "dp-sgd, book-keeping" if part == "gep" else BASE
        result[part] = {
            name: {key: round(own["ratio"], 4) for key, own in _ratios(section, base).items()}
            for name, section in summary[part].items()
        }
    return result


def draw(folder: pathlib.Path):
    """Draw `speed.png` from the `summary.json` of a run folder, and from nothing else."""
    from matplotlib.figure import Figure

    summary = read_json(folder / "summary.json")
    lower = []
    if summary["scaling"]:
        lower += [
            lambda axes: _draw_lines(
                axes, summary, "batch", "batch_size", "batch (MLP, 669,706 parameters)"
            ),
            lambda axes: _draw_lines(
                axes, summary, "width", "floats", "parameters (MLP, batch 256)"
            ),
        ]
    if summary["gep"]:
        lower.append(lambda axes: _draw_gep(axes, summary))
    upper = bool(summary["models"])
    height = upper + bool(lower)
    figure = Figure(figsize=(11, 4 * height), layout="constrained")
    grid = figure.add_gridspec(height, max(1, len(lower)))
    if upper:
        _draw_bars(figure.add_subplot(grid[0, :]), summary)
    for column, panel in enumerate(lower):
        panel(figure.add_subplot(grid[-1, column]))
    figure.savefig(folder / "speed.png", dpi=130)


def _draw_bars(axes, summary: dict[str, Any]):
    shown = [OURS, "jdp vmap", "jdp scan", "optax.contrib", "jax-privacy"]
    rows = list(_model_rows(summary))
    for number, label in enumerate(shown):
        for place, (_, row) in enumerate(rows):
            forms = [own for name, own in row["found"].items() if name.startswith(label)]
            if not forms:
                continue
            best = min(forms, key=lambda own: own["ratio"])
            error = [[best["ratio"] - best["low"]], [best["high"] - best["ratio"]]]
            axes.bar(
                place + 0.16 * (number - 2),
                best["ratio"],
                0.16,
                yerr=error,
                color=f"C{number}",
                error_kw={"linewidth": 1},
            )
        axes.bar(0, 0, color=f"C{number}", label=label)
    axes.axhline(1, color="black", linewidth=1)
    axes.set_yscale("log")
    ticks = [0.5, 1, 2, 3, 5, 10, 20, 50, 100, 200]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0.4)
    axes.set_xticks(range(len(rows)), [name for name, _ in rows])
    axes.set_ylabel("time of a step over the non-private step")
    axes.set_title(summary["machine"], fontsize="small")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(fontsize="small")


def _draw_lines(axes, summary: dict[str, Any], start: str, key: str, label: str):
    chosen = [s for name, s in summary["scaling"].items() if name.startswith(start)]
    for number, name in enumerate((OURS, "jdp vmap")):
        points = [
            (section[key], _ratios(section, BASE)[name])
            for section in chosen
            if name in section["contestants"]
        ]
        if points:
            xs, found = zip(*points, strict=True)
            axes.plot(xs, [own["ratio"] for own in found], "o-", color=f"C{number}", label=name)
            lows, highs = ([own[end] for own in found] for end in ("low", "high"))
            axes.fill_between(xs, lows, highs, color=f"C{number}", alpha=0.2)
    if chosen:
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.legend(fontsize="small")
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xlabel(label)
    axes.set_ylabel("over non-private")
    axes.grid(alpha=0.3)


def _draw_gep(axes, summary: dict[str, Any]):
    place, ticks = 0, []
    for number, (name, section) in enumerate(summary["gep"].items()):
        found = _ratios(section, "dp-sgd, book-keeping")
        for key, own in found.items():
            if key.startswith(("gep", "naive", "alone")):
                axes.barh(place, own["ratio"], color=f"C{number}", label=name)
                ticks.append(key)
                place += 1
    axes.set_yticks(range(place), ticks, fontsize="x-small")
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xlabel("over DP-SGD, book-keeping")
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    if once:
        axes.legend(once.values(), once.keys(), fontsize="small")

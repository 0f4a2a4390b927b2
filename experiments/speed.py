"""Time private training steps against the non-private step of the same network.

For each network, one process times in turns, round after round:

  non-private          the gradient of the mean loss, and an SGD update
  jdp book-keeping     one full private step: clipped sum, noise, SGD update; so do all that follow
  jdp vmap, jdp scan   the same with per-example gradients written out, at once or in parts
  optax.contrib        vmap(grad) and differentially_private_aggregate
  jax-privacy          its clipped_grad and gaussian_privatizer; microbatch none, 16 and 1
  opacus               (--peers opacus) the same networks in PyTorch, with hooks and in ghost mode,
                       in a process of their own and against their own non-private step

What is compared is the RATIO to the non-private step in the same round, so that other work on the
machine meets both; its median has a 95% bootstrap interval. Beside each time stand XLA's temporary
memory and the compile time. Then come GEP's step against DP-SGD's and a naive GEP (one refresh of
the subspace and all steps until the next, over their number), and how the MLP's ratio changes with
the batch and with the number of parameters. Results go to a folder (summary.json, report.txt,
speed.png); a run that was interrupted is taken up where it stopped. The last line on standard
output is the summary as one JSON object.

  python -m experiments.speed                                 all networks, 15 rounds
  python -m experiments.speed --models mlp text --parts models   two of them, nothing else
  python -m experiments.speed --peers optax jax-privacy opacus   with PyTorch and Opacus as well
  python -m experiments.speed --smoke                         tiny networks, to see it work

Opacus is looked for in `.venv-opacus` (python3 -m venv .venv-opacus && .venv-opacus/bin/pip
install torch opacus), or run by the Python that JDP_OPACUS_PYTHON names. Use an idle machine.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax

import jdp
from experiments import _options, _run, _speed_gep, _speed_tables
from experiments._run import UsageError
from experiments._speed_gep import SIZES, gep_contestants
from experiments._speed_models import mlp, rows
from experiments._speed_steps import (
    PEERS,
    Contestant,
    contestants,
    has_jax_privacy,
    num_parameters,
    prepare,
)
from experiments._timing import machine, median, race

PARTS = ("models", "gep", "scaling")
ALL_PEERS = (*PEERS, "opacus")
SMOKE = {"repeats": 2, "models": ("mlp",)}
BATCHES = (64, 256, 1_024, 4_096)
WIDTHS = (112, 300, 682, 1_420, 2_795)  # of the two hidden layers: 1e5 to 1e7 parameters
MOST_FLOATS = 2**30  # per-example gradients that vmap may write out here: 4 GiB
ROOT = pathlib.Path(__file__).parents[1]


@dataclasses.dataclass(frozen=True)
class Args:
    """Options."""

    models: tuple[str, ...] = ()
    """Networks of the main table: mlp, cnn (nn.Conv), cnn-patches (the same by products over
    patches), transformer, text, lora, resnet20; all by default."""
    peers: tuple[str, ...] = PEERS
    """Other libraries to time: optax, jax-privacy, opacus; those not installed are left out."""
    parts: tuple[str, ...] = PARTS
    """What to time: models (the main table), gep, scaling."""
    repeats: int = 15
    """Rounds of the main table; scaling takes a third of them, gep (in long cycles) a fifth."""
    budget: float = 12.0
    """Seconds of measurement after which a slow contestant sits out, once it has 5 rounds."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/speed."""
    smoke: bool = False
    """Only check that everything works: a tiny MLP, 2 rounds, where not given."""


def main(args: Args) -> dict[str, Any]:
    """Time everything and return the summary."""
    if args.smoke:
        args = _options.smaller(args, SMOKE)
    known = rows(args.smoke)
    args = dataclasses.replace(args, models=args.models or tuple(known))
    check(args, tuple(known))
    default = pathlib.Path("runs", "speed-smoke" if args.smoke else "speed")
    folder = _run.Folder(args.out or default, "speed")
    shared = {"repeats": args.repeats, "budget": args.budget, "smoke": args.smoke, "code": code()}
    shared |= {"machine": machine(), "jax": jax.__version__}
    few = shared | {"repeats": max(2, args.repeats // 3)}
    inside = tuple(peer for peer in args.peers if peer in PEERS)
    if "jax-privacy" in inside and not has_jax_privacy():
        print("jax-privacy is not installed and left out: pip install jax-privacy", file=sys.stderr)
    sections: dict[str, dict[str, Any]] = {part: {} for part in (*PARTS, "opacus")}

    def measure(part, name, make, config, facts) -> None:
        result = folder.get(f"{part}/{name}", config)
        if result is None:
            timed = _race(name, make(), config["repeats"], args.budget)
            result = folder.put(f"{part}/{name}", config, facts | {"contestants": timed})
        sections[part][name] = result

    for name in args.models if "models" in args.parts else ():
        row = known[name]
        facts = {"title": row.title, "batch_size": row.batch_size, "floats": num_parameters(row)}
        make = lambda row=row: contestants(row, inside, parts=True)  # noqa: E731
        measure("models", name, make, shared | {"peers": inside}, facts)
    if "opacus" in args.peers and "models" in args.parts:
        for name in args.models:
            if name == "cnn-patches":
                continue  # the same network as cnn
            result = folder.get(f"opacus/{name}", shared)
            if result is None:
                result = folder.put(f"opacus/{name}", shared, _opacus(name, args))
            sections["opacus"][name] = result
    for name, size in (
        (_speed_gep.SMOKE if args.smoke else SIZES).items() if "gep" in args.parts else ()
    ):
        make = lambda size=size: gep_contestants(known[size.model], size)  # noqa: E731
        rounds = {"repeats": max(2, args.repeats // 5)}
        measure("gep", name, make, shared | rounds | size._asdict(), size._asdict())
    for name, row in _scaling(args.smoke).items() if "scaling" in args.parts else ():
        floats = num_parameters(row)
        fits = floats * row.batch_size <= MOST_FLOATS
        strategies = ("book-keeping", "vmap") if fits else ("book-keeping",)
        make = lambda row=row, few=strategies: contestants(row, strategies=few)  # noqa: E731
        facts = {"title": row.title, "batch_size": row.batch_size, "floats": floats}
        measure("scaling", name, make, few, facts)

    summary = {
        "experiment": "speed",
        "machine": machine(),
        "repeats": args.repeats,
        "smoke": args.smoke,
    } | sections
    summary["provenance"] = _run.provenance()
    _run.write_json(folder.path / "summary.json", summary)
    text = _speed_tables.report(summary)
    (folder.path / "report.txt").write_text(text)
    _speed_tables.draw(folder.path)
    print(f"{text}\nwritten to {folder.path}")
    return _speed_tables.brief(summary)


def check(args: Args, known: tuple[str, ...]):
    """Refuse options that mean nothing."""
    allowed = {"models": known, "peers": ALL_PEERS, "parts": PARTS}
    _options.check_names(args, allowed, none=("peers",))
    for key in ("repeats", "budget"):
        if not getattr(args, key) > 0:
            raise UsageError(f"--{key} must be above 0, but got {getattr(args, key)}")


def code() -> str:
    """What is timed, in short: a time measured with other code is no part of the same table."""
    own = pathlib.Path(__file__).parent
    files = [*pathlib.Path(jdp.__file__).parent.glob("*.py"), *own.glob("_speed*.py")]
    text = b"".join(path.read_bytes() for path in sorted([*files, own / "_timing.py"]))
    return hashlib.sha256(text).hexdigest()[:12]


def _race(
    name: str, entries: Mapping[str, Contestant], repeats: int, budget: float
) -> dict[str, dict[str, Any]]:
    """Compile and time contestants; seconds and times are of one training step."""
    with _run.progress(f"{name}: compile", len(entries)) as advance:
        calls, facts = prepare(entries, advance)
    with _run.progress(f"{name}: time", repeats * len(entries)) as advance:
        times = race(calls, repeats, budget, advance)
    for key, own in facts.items():
        steps = own.pop("steps")
        own["times"] = [None if t is None else round(t / steps, 7) for t in times[key]]
        own["seconds"] = median(own["times"])
    return facts


def _scaling(smoke: bool) -> dict[str, Any]:
    if smoke:
        return {"batch 4": mlp((16, 8, 10), 4)}
    by_batch = {f"batch {n:,}": mlp((784, 512, 512, 10), n) for n in BATCHES}
    return by_batch | {f"width {w:,}": mlp((784, w, w, 10), 256) for w in WIDTHS}


def opacus_python() -> str | None:
    """The Python that has torch and opacus, if there is one."""
    venv = ROOT / ".venv-opacus" / "bin" / "python"
    for python in (os.environ.get("JDP_OPACUS_PYTHON"), str(venv), sys.executable):
        if python and pathlib.Path(python).exists():
            probe = (
                "from importlib.util import find_spec as f; exit(not (f('torch') and f('opacus')))"
            )
            if subprocess.run([python, "-c", probe], cwd=ROOT).returncode == 0:
                return python
    return None


def _opacus(name: str, args: Args) -> dict[str, Any]:
    """Time one network in PyTorch, in a process of its own."""
    python = opacus_python()
    if python is None:
        raise UsageError(
            "--peers opacus needs torch and opacus: python3 -m venv .venv-opacus && "
            ".venv-opacus/bin/pip install torch opacus"
        )
    options = {"model": name, "repeats": args.repeats, "budget": args.budget, "smoke": args.smoke}
    print(f"{name}: Opacus, in a process of its own", file=sys.stderr, flush=True)
    done = subprocess.run(
        [python, "-m", "experiments._speed_opacus", json.dumps(options)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    if done.returncode:
        raise UsageError(f"Opacus failed on {name}; its message is above. Leave it out of --peers")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    _run.command_line(Args, main)

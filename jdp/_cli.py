"""The `jdp` console command: epsilon, calibrate, report."""

import argparse
import json
import os
import pathlib
import sys
from typing import get_args

from jdp import accounting
from jdp._typing import Adjacency

_EXAMPLES = """examples:
  what a run costs (60 epochs of MNIST in Poisson batches of 256):
    jdp epsilon --noise-multiplier 1.1 --sampling-rate 0.0042667 --steps 14062 --delta 1e-5
  the noise that keeps a run within a budget:
    jdp calibrate --epsilon 2 --sampling-rate 0.02 --steps 2500 --delta 1e-5
  the privacy statement of a finished run:
    jdp report runs/gep-mnist

The noise multiplier is the noise's standard deviation over the L2 sensitivity under the declared
adjacency. The sampling rate is batch size / number of examples, and holds for Poisson sampling
only; shuffled batches count as one step at rate 1 an epoch.
"""


def main(argv: list[str] | None = None) -> int:
    """Run the command.

    Args:
      argv: the arguments, by default those of the process.

    Returns:
      Exit status: 0, or 2 for bad input, with one message on standard error.

    >>> main("epsilon --noise-multiplier 1 --steps 1 --delta 1e-5".split())
    epsilon 4.37718 at delta 1e-05 (zero-out)
    exact: exact curve of the Gaussian mechanism (Balle and Wang 2018)
    0
    """
    try:
        args = _parser().parse_args(argv)
    except SystemExit as end:
        raise SystemExit(end.code or _print("")) from None  # of help, which may lie in a buffer
    try:
        text = args.run(args)
    except (ValueError, TypeError, OSError, ArithmeticError) as error:
        if args.debug:
            raise
        print(f"jdp {args.command}: {error}", file=sys.stderr)
        return 2
    return _print(f"{text}\n")


def _print(text: str) -> int:
    """Print to a standard output that may be gone; returns the exit status."""
    try:
        print(text, end="", flush=True)
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            return 0  # whoever reads has read enough
        remedy = "Send standard output elsewhere."
        print(f"jdp: cannot print the result: {error.strerror}. {remedy}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jdp",
        description="Differential privacy accounting for DP-SGD and its relatives.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name, run, summary):
        command = commands.add_parser(
            name,
            help=summary,
            description=summary,
            epilog=_EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="print JSON for programs")
        command.add_argument("--debug", action="store_true", help="show where an error happened")
        return command

    epsilon = add("epsilon", _epsilon, "what a run with a given noise multiplier costs")
    epsilon.add_argument("--noise-multiplier", type=float, required=True, metavar="Z")
    _add_run(epsilon)
    calibrate = add("calibrate", _calibrate, "the least noise multiplier within a budget")
    calibrate.add_argument("--epsilon", type=float, required=True, metavar="E")
    _add_run(calibrate)
    report = add("report", _report, "print the privacy statement of a finished run")
    report.add_argument("run_dir", type=pathlib.Path, metavar="RUN_DIR")
    return parser


def _add_run(command: argparse.ArgumentParser) -> None:
    command.add_argument("--delta", type=float, required=True, metavar="D")
    command.add_argument("--steps", type=int, default=1, metavar="T", help="default: 1")
    command.add_argument(
        "--sampling-rate",
        type=float,
        default=1.0,
        metavar="Q",
        help="batch size / number of examples, for Poisson sampling (default: 1, no sampling)",
    )
    command.add_argument(
        "--accountant", choices=get_args(accounting.Accountant), default="pld", help="default: pld"
    )
    command.add_argument(
        "--adjacency",
        choices=get_args(Adjacency),
        default="zero-out",
        help="default: zero-out",
    )


def _spent(args: argparse.Namespace, noise_multiplier: float) -> dict:
    event = accounting.dp_sgd_event(
        noise_multiplier, steps=args.steps, sampling_rate=args.sampling_rate
    )
    spent = accounting.privacy_spent(
        event, delta=args.delta, accountant=args.accountant, adjacency=args.adjacency
    )
    return {
        "epsilon": spent.epsilon if spent.epsilon < float("inf") else "inf",
        "delta": spent.delta,
        "noise_multiplier": noise_multiplier,
        "sampling_rate": args.sampling_rate,
        "steps": args.steps,
        "adjacency": spent.adjacency,
        "accountant": spent.accountant,
        "method": spent.method,
    }


def _epsilon(args: argparse.Namespace) -> str:
    found = _spent(args, args.noise_multiplier)
    return json.dumps(found) if args.json else _describe(found)


def _describe(found: dict) -> str:
    cost = f"epsilon {float(found['epsilon']):.6g} at delta {found['delta']:g}"
    return f"{cost} ({found['adjacency']})\n{found['accountant']}: {found['method']}"


def _calibrate(args: argparse.Namespace) -> str:
    z = accounting.calibrate_noise_multiplier(
        args.epsilon,
        delta=args.delta,
        steps=args.steps,
        sampling_rate=args.sampling_rate,
        accountant=args.accountant,
        adjacency=args.adjacency,
    )
    found = {**_spent(args, float(z)), "target_epsilon": args.epsilon}
    if args.json:
        return json.dumps(found)
    return f"noise multiplier {z:.8g}\n{_describe(found)}"


def _report(args: argparse.Namespace) -> str:
    path = args.run_dir / ("summary.json" if args.json else "report.txt")
    if not path.is_file():
        remedy = "Pass the folder that a finished run was told to write with --out."
        if (args.run_dir / "results.json").is_file():
            remedy = (
                "The run is unfinished: run the same command again, with the same --out, and it "
                "goes on where it stopped."
            )
        raise FileNotFoundError(f"no {path.name} in {args.run_dir}. {remedy}")
    try:
        text = path.read_text(encoding="utf-8").rstrip("\n")
        if args.json and not isinstance(json.loads(text), dict):
            raise ValueError("no object")
    except (ValueError, RecursionError):
        kind = "a JSON object" if args.json else "UTF-8 text"
        raise ValueError(
            f"{path} is not {kind}, so no run of jdp wrote it. Pass the folder that a finished run "
            "was told to write with --out."
        ) from None
    return text


if __name__ == "__main__":
    sys.exit(main())

"""PATE: learn from private images without ever putting them into the model that is released.

The private images are shared out to teachers, disjointly, and each teacher is an ordinary network
trained on its few images. The teachers then vote on the labels of public images. One record can
change one teacher, hence one vote an image, so noise that hides one vote hides the record: only the
winner of the noisy vote is released (GNMax, Papernot et al. 2018). A student, trained on the public
images with these labels, is the model that may be published.

What to know before choosing options:

  --teachers   more of them drown the noise, but each learns from fewer images
  --queries    the student needs many, but every label costs budget, and the noise grows with the
               square root of their number. Good where the noise, whose standard deviation is in the
               report, is about a seventh of the teachers: on the default data 50 queries for
               epsilon 1 and 150 for 2 (250 teachers), 200 for 5 and 300 for 8 (100 teachers)
  --threshold  ask first, under noise of its own, whether teachers agree, and label only images on
               which they do (the confident aggregator), at most --answers of them

The epsilon printed does not depend on the data. PATE needs many private records a class: 3,500 of
them, as in the default data, are few. The same public images and test set are those of
`python -m experiments.gep`, where `--methods dp-sgd gep pate` puts all into one table. Results go
to a folder (summary.json, report.txt, curves.png); a run that was interrupted is taken up where it
stopped. The last line on standard output is the summary as one JSON object.

  python -m experiments.pate                                            5,000 digits, epsilon 1
  python -m experiments.pate --epsilon 8 --teachers 100 --queries 300   another budget
  python -m experiments.pate --dataset mnist --data-dir DATA            60,000 digits
  python -m experiments.pate --queries 200 --threshold 90 --answers 50  only where they agree
  python -m experiments.pate --smoke                                    a few steps, to see it work
"""

import dataclasses
import pathlib
from typing import Any, Literal

from experiments import _run, gep

SMOKE = gep.SMOKE


@dataclasses.dataclass(frozen=True)
class Args:
    """Options; a hyper-parameter that is not given has its default for the data set."""

    dataset: Literal["mnist-5k", "digits", "mnist", "cifar10", "svhn_cropped"] = "mnist-5k"
    """Data set; the last three are read from --data-dir, or downloaded by tensorflow-datasets."""
    model: Literal["mnist_cnn", "resnet20", "mlp"] | None = None
    """Network of teachers and student; by default as in experiments.gep."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of mnist_cnn and mlp."""
    epsilon: float = 1.0
    """Privacy budget."""
    delta: float = 1e-5
    """Probability with which the privacy bound may fail; keep it below 1 / private images."""
    seeds: int = 5
    """Number of runs; the summary has mean and standard deviation."""
    seed: int | None = None
    """Make the run reproducible; it is then NOT private against whoever knows the seed."""
    teachers: int | None = None
    """Teachers; the private images are shared out to them."""
    queries: int | None = None
    """Public images that the teachers are asked about."""
    threshold: float | None = None
    """Votes that an image needs for its label; by default every query gets one."""
    answers: int | None = None
    """With --threshold: how many queries are answered at most."""
    steps: int | None = None
    """Training steps of each teacher, and of the student."""
    batch_size: int | None = None
    """Images a step."""
    learning_rate: float | None = None
    """Learning rate of teachers and student."""
    schedule: Literal["constant", "step", "cosine"] | None = None
    """Learning rate over time."""
    momentum: float | None = None
    """Momentum."""
    weight_decay: float | None = None
    """Weight decay."""
    num_public: int | None = None
    """How many training images become public (and leave the private part)."""
    max_examples: int | None = None
    """Use only so many private and so many test images."""
    data_dir: pathlib.Path | None = None
    """Folder of prepared data sets, as tensorflow-datasets lays them out."""
    validation: int = 0
    """Evaluate on this many of the private records, held out, instead of the test set."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/pate/<data set>-eps<epsilon>."""
    smoke: bool = False
    """Only check that everything works: 1 seed, 4 steps, 200 examples, 10 teachers, where not
    given."""


def main(args: Args) -> dict[str, Any]:
    """Run PATE as the one method of `experiments.gep`, and return its summary."""
    options = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    if args.learning_rate is not None:
        options["learning_rate"] = (args.learning_rate,)
    ending = "-smoke" if args.smoke else "-validation" if args.validation else ""
    default = pathlib.Path("runs", "pate", f"{args.dataset}-eps{args.epsilon:g}{ending}")
    options["out"] = args.out or default
    return gep.main(gep.Args(methods=("pate",), **options))


if __name__ == "__main__":
    _run.command_line(Args, main)

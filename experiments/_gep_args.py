"""The options of `experiments.gep`, and what can be refused before data is touched."""

import dataclasses
import pathlib
from typing import Literal

import jax
import numpy as np

from experiments._methods import METHODS, OPTIONAL, WITH_LABELS
from experiments._run import UsageError


@dataclasses.dataclass(frozen=True)
class Args:
    """Options; a hyper-parameter that is not given has its tuned or published default."""

    dataset: Literal["mnist-5k", "digits", "mnist", "cifar10", "svhn_cropped"] = "mnist-5k"
    """Data set; the last three are read from --data-dir, or downloaded by tensorflow-datasets."""
    methods: tuple[str, ...] = ()
    """Which to run; by default the first six, but for public-only where --num-public is 0."""
    model: Literal["mnist_cnn", "resnet20", "mlp"] | None = None
    """Network; by default mnist_cnn on 28x28 images, resnet20 on 32x32, mlp on 8x8."""
    activation: Literal["tanh", "relu"] = "tanh"
    """Activation of mnist_cnn and mlp."""
    epsilon: float = 1.0
    """Privacy budget of each private method."""
    delta: float = 1e-5
    """Probability with which the privacy bound may fail; keep it below 1 / private images."""
    seeds: int = 5
    """Number of runs of each method; the summary has mean and standard deviation."""
    seed: int | None = None
    """Make the run reproducible; it is then NOT private against whoever knows the seed."""
    anchors: str = "in-distribution"
    """Public images for GEP: in-distribution, tiny-imagenet, imagenet, digits, or PATH.npy."""
    num_anchors: int | None = None
    """How many public images to use; all by default."""
    num_public: int | None = None
    """How many training images become public (and leave the private part)."""
    max_examples: int | None = None
    """Use only so many private and so many test images."""
    data_dir: pathlib.Path | None = None
    """Folder of prepared data sets, as tensorflow-datasets lays them out."""
    validation: int = 0
    """Evaluate on this many of the private records, held out, instead of the test set."""
    out: pathlib.Path | None = None
    """Run folder; by default runs/gep/<data set>-eps<epsilon>."""
    resume_as_new: bool = False
    """If what determines an unfinished run changed: take new keys, and charge its steps again."""
    save_every: float = 60.0
    """Seconds between checkpoints."""
    eval_every: int | None = None
    """Steps between two evaluations; by default a twentieth of the run."""
    devices: int = 1
    """How many devices share the private data and every batch; pate has one."""
    smoke: bool = False
    """Only check that everything works: 1 seed, 4 steps, 200 examples, rank 8, where not given."""
    epochs: float | None = None
    """Passes over the private data, instead of --steps."""
    steps: int | None = None
    """Training steps."""
    batch_size: int | None = None
    """Expected batch size (each record is drawn independently for each batch)."""
    learning_rate: tuple[float, ...] | None = None
    """Learning rate: one for all methods, or one for each of --methods in their order."""
    schedule: Literal["constant", "step", "cosine"] | None = None
    """Learning rate over time; step divides it by ten half-way, as in the paper."""
    momentum: float | None = None
    """Momentum, applied after the noise."""
    weight_decay: float | None = None
    """Weight decay, applied after the noise."""
    average: float | None = None
    """Evaluate the exponential moving average of the parameters, with this decay."""
    augmentations: int | None = None
    """Average the gradient over this many random shifts of a record, before the clip; 0: none."""
    clip_norm: float | None = None
    """Clip norm of the methods that clip whole gradients."""
    clip_norms: tuple[float, float] | None = None
    """Clip norms S1 S2 of gep: in the subspace, and outside it; b-gep uses S1."""
    rank: int | None = None
    """Dimension of the subspace, shared out over the parameter groups."""
    groups: int | None = None
    """Number of parameter groups, each with a subspace of its own."""
    power_iterations: int | None = None
    """Power iterations for each subspace."""
    refresh_every: int | None = None
    """Steps for which a subspace is kept."""
    warm_start: bool | None = None
    """Start the power iteration from the last subspace."""
    whitening: float | None = None
    """How far to even out the coordinates in the subspace: 0 (not at all) to 1."""
    noise_split: Literal["equal", "optimal"] | None = None
    """Share of the budget between the two parts of gep; equal as in the paper."""
    joint_clip: bool | None = None
    """Clip the two parts of gep together, which halves the variance of the noise."""
    subspace: Literal["random-labels", "true-labels", "gaussian"] | None = None
    """What spans it: gradients of the anchors under random or their true labels, or chance."""
    drop_rate: float | None = None
    """Share of the coordinates that sparsified drops in the end; it begins with none."""
    floor: float | None = None
    """Least root of a second moment that adadps and dp-adam-bc divide by."""
    mixing: float | None = None
    """Weight of the private update in pda-dpmd; by default it falls from 1 to 0 along a cosine."""
    components: int | None = None
    """Principal components for class-means."""
    teachers: int | None = None
    """Teachers of pate; the private images are shared out to them."""
    queries: int | None = None
    """Public images that pate's teachers are asked about."""
    threshold: float | None = None
    """Votes that an image needs for its label in pate; by default every query gets one."""
    answers: int | None = None
    """With --threshold: how many queries are answered at most."""


def check(args: Args):
    """Refuse what can be refused before data is touched."""
    unknown = [method for method in args.methods if method not in METHODS + OPTIONAL]
    if unknown or len(set(args.methods)) < len(args.methods):
        got = " ".join(unknown or args.methods)
        raise UsageError(
            f"--methods must be different ones of {' '.join(METHODS + OPTIONAL)}, but got {got}"
        )
    for method in args.methods if args.num_public == 0 else ():
        if method in WITH_LABELS:
            raise UsageError(f"{method} needs --num-public above 0; leave it out of --methods")
    if not 0 < args.delta < 1:
        raise UsageError(f"--delta must lie between 0 and 1, but got {args.delta}")
    available = jax.device_count()
    if not 1 <= args.devices <= available:
        remedy = "on a CPU, XLA_FLAGS=--xla_force_host_platform_device_count=N makes N virtual ones"
        raise UsageError(f"--devices must be 1 to {available}, but got {args.devices}; {remedy}")
    if args.devices > 1 and "pate" in args.methods:
        raise UsageError(
            f"--devices must be 1 for pate, whose teachers are trained on one, but got "
            f"{args.devices}; run pate by itself"
        )
    if args.learning_rate and len(args.learning_rate) not in (1, len(args.methods)):
        raise UsageError("--learning-rate takes one value, or one for each of --methods")
    if args.steps is not None and args.epochs is not None:
        raise UsageError("give --steps or --epochs, not both")
    positive = ("epsilon", "seeds", "epochs", "steps", "batch_size", "clip_norm", "clip_norms")
    positive += ("learning_rate", "rank", "groups", "power_iterations", "refresh_every", "floor")
    positive += ("teachers", "queries", "threshold", "answers")
    for key in (*positive, "components", "eval_every", "num_anchors", "max_examples"):
        value = getattr(args, key)
        values = value if isinstance(value, tuple) else (value,)
        if not all(v is None or (v > 0 and np.isfinite(v)) for v in values):
            raise UsageError(f"--{key.replace('_', '-')} must be above 0, but got {value}")
    limits = {
        "momentum": 1,
        "weight_decay": 1,
        "average": 1,
        "augmentations": np.inf,
        "validation": np.inf,
        "num_public": np.inf,
        "save_every": np.inf,
    }
    for key, limit in (limits | {"seed": 2**32}).items():
        value = getattr(args, key)
        if value is not None and not 0 <= value < limit:
            bounds = "at least 0" if np.isinf(limit) else f"at least 0 and below {limit}"
            raise UsageError(f"--{key.replace('_', '-')} must be {bounds}, but got {value}")
    for key in ("whitening", "drop_rate", "mixing"):
        value = getattr(args, key)
        if value is not None and not 0 <= value <= 1:
            raise UsageError(f"--{key.replace('_', '-')} must be from 0 to 1, but got {value}")
    for norm in (args.clip_norm, *(args.clip_norms or ())):
        if norm is not None and not 1e-12 <= norm <= 1e12:
            raise UsageError(f"clip norms must be from 1e-12 to 1e12, but got {norm}")

"""Tasks of `experiments.hypernet_head`: to tell two classes apart, from features of images."""

import dataclasses
import pathlib
from typing import NamedTuple

import numpy as np

from experiments import _features, datasets
from experiments._run import UsageError


@dataclasses.dataclass(frozen=True)
class Pool:
    """Images of one part: features (n, d) and labels."""

    x: np.ndarray
    y: np.ndarray

    def all_of(self, pair: np.ndarray):
        """Return the features of all images of a pair of classes, and labels -1 or 1."""
        rows = np.isin(self.y, pair)
        return self.x[rows], np.where(self.y[rows] == pair[1], 1, -1).astype(np.float32)

    def largest(self, classes: np.ndarray) -> int:
        """The most records that `draw` can draw, whichever pair of these classes."""
        return 2 * min(int((self.y == label).sum()) for label in classes)

    def draw(self, rng: np.random.Generator, pair: np.ndarray, count: int):
        """Return (count, d) features and labels -1 or 1, half of each class of the pair."""
        signs = np.where(np.arange(count) % 2, 1, -1)
        rows = np.empty(count, int)
        for sign, label in zip((-1, 1), pair, strict=True):
            found = np.flatnonzero(self.y == label)
            wanted = int((signs == sign).sum())
            if wanted > len(found):
                raise UsageError(f"--sizes must be at most {2 * len(found)}, but got {count}")
            rows[signs == sign] = rng.choice(found, wanted, replace=False)
        return self.x[rows], signs.astype(np.float32)


class Parts(NamedTuple):
    """What the tasks are made of.

    Attributes:
      public: images of public tasks.
      private: images of private sets.
      test: images that private heads are tested on.
      classes: of public tasks.
      private_classes: of private tasks; the public part has no image of them if they are unseen.
      source: where the images came from, for the report.
      digest: of the file's public parts, so that a run is not taken up with others; None without.
    """

    public: Pool
    private: Pool
    test: Pool
    classes: np.ndarray
    private_classes: np.ndarray
    source: str
    digest: str | None


def load(features: str, dimension: int, unseen: int) -> Parts:
    """Public, private and test parts, in the principal components of the public one.

    Args:
      features: path of a .npz file, as `_features.read` takes, or digits.
      dimension: principal components to keep.
      unseen: how many classes, the last ones, the public part has no image of.

    Raises:
      UsageError: the file holds something else, or a part lacks a class.
    """
    digest = None
    if features == "digits":
        data = datasets.load("digits", num_public=700)
        parts = [
            (data.public_images, data.public_labels),
            (data.train_images, data.train_labels),
            (data.test_images, data.test_labels),
        ]
        source = data.source
    else:
        found = _features.read(pathlib.Path(features))
        x, y, half = found.train, found.train_labels, len(found.train) // 2
        parts = [(x[:half], y[:half]), (x[half:], y[half:]), (found.test, found.test_labels)]
        source = f"{pathlib.Path(features).name}, halved"
        digest = _features.public_digest(found)
    flat = [(x.reshape(len(x), -1).astype(np.float32), np.asarray(y)) for x, y in parts]
    classes, private_classes = _classes([y for _, y in flat], unseen)
    x, y = flat[0]
    seen = np.isin(y, classes)
    flat[0] = x, y = x[seen], y[seen]
    mean = x.mean(0)
    values, vectors = np.linalg.eigh(np.cov((x - mean).T))
    keep = np.argsort(-values)[:dimension]
    scale = np.sqrt(values[keep].sum())  # mean squared norm 1
    pools = [Pool(((x - mean) @ vectors[:, keep] / scale).astype(np.float32), y) for x, y in flat]
    return Parts(pools[0], pools[1], pools[2], classes, private_classes, source, digest)


def _classes(labels: list[np.ndarray], unseen: int) -> tuple[np.ndarray, np.ndarray]:
    """The classes of public and of private tasks, from the labels of all three parts."""
    every = np.unique(np.concatenate(labels))
    if len(every) < unseen + 2:
        least = f"{unseen + 2} classes or more"
        raise UsageError(f"--features must have {least}, but has {len(every)}")
    hidden = every[len(every) - unseen :]
    classes = np.setdiff1d(labels[0], hidden)
    if len(classes) < 2:
        least = "2 classes or more that are not unseen in its public, first half"
        raise UsageError(f"--features must have {least}, but has {len(classes)}")
    private_classes = hidden if unseen else classes
    for own, name in zip(labels[1:], ("train, in its private, second half", "test"), strict=True):
        if len(absent := np.setdiff1d(private_classes, own)):
            wanted = f"images of all classes of private tasks in {name}"
            raise UsageError(f"--features must have {wanted}, but has none of {absent.tolist()}")
    return classes, private_classes


def pairs(classes: np.ndarray, rng: np.random.Generator, count: int) -> np.ndarray:
    """Random ordered pairs of different classes, (count, 2)."""
    return np.stack([rng.permutation(classes)[:2] for _ in range(count)])


def records(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """What the encoder sees: features, features signed by the label, and the label."""
    sign = y[..., None]
    return np.concatenate([x, x * sign, sign], -1)

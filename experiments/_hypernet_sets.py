"""Sets made of nearest neighbours: many public ones, and a few private ones with little overlap."""

import hashlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments import datasets


class Images(NamedTuple):
    """Images in -1..1 with labels: the public and the private part of one source.

    Attributes:
      public: (n, height, width, channels), with `public_labels`.
      public_labels: known for public images; they train the network behind the features.
      private: images that no public stage looks at, with `private_labels`.
      private_labels: for the captions of pictures only.
      source: where they came from, for the report.
      public_digest: of the public part as it was read, so that a run is not taken up with others.
    """

    public: np.ndarray
    public_labels: np.ndarray
    private: np.ndarray
    private_labels: np.ndarray
    source: str
    public_digest: str


def load(name: str, size: int, num_public: int, num_private: int, data_dir=None) -> Images:
    """Load a data set, halve it and bring its images to `size` x `size`, in -1..1."""
    data = datasets.load(name, data_dir, num_public=num_public)
    grey = data.image_shape[-1] == 1
    parts = []
    for images in (data.public_images, data.train_images[:num_private]):
        unit = images if grey else (images + 2) / 4
        margin = 2 if images.shape[1] == 28 and size < 28 else 0  # MNIST's blank border
        inside = unit[:, margin : images.shape[1] - margin, margin : images.shape[2] - margin]
        parts.append(_resize(inside, size) * 2 - 1)
    labels = data.public_labels, data.train_labels[:num_private]
    source = f"{data.source}, the first {len(labels[1]):,} private ones used, at {size}x{size}"
    digest = hashlib.sha256()
    for array in (data.public_images, data.public_labels):
        digest.update(np.ascontiguousarray(array).data)
    return Images(parts[0], labels[0], parts[1], labels[1], source, digest.hexdigest()[:16])


def _resize(images: np.ndarray, size: int) -> np.ndarray:
    if images.shape[1] == size:
        return images
    resize = jax.jit(
        lambda x: jax.image.resize(x, (len(x), size, size, x.shape[-1]), "linear", antialias=True)
    )
    blocks = [np.asarray(resize(images[i : i + 1_000])) for i in range(0, len(images), 1_000)]
    return np.clip(np.concatenate(blocks), 0, 1).astype(np.float32)


def neighbours(queries: np.ndarray, features: np.ndarray, count: int) -> np.ndarray:
    """Rows of the `count` nearest features to each query, by exact search: (queries, count).

    A query that is itself among the features is its own nearest neighbour.
    """

    @jax.jit
    def nearest(block, features, squares):
        products = jnp.matmul(block, features.T, precision=jax.lax.Precision.HIGHEST)
        return jax.lax.top_k(2 * products - squares, count)[1]

    rows, size = [], 256
    for start in range(0, len(queries), size):
        block = queries[start : start + size]
        filled = np.pad(block, ((0, size - len(block)), (0, 0)))
        found = nearest(filled, features, (features**2).sum(1))
        rows.append(np.asarray(found, np.int32)[: len(block)])
    return np.concatenate(rows)


def little_overlap(candidates: np.ndarray, count: int) -> np.ndarray:
    """Choose `count` of the candidate sets (m, k) one by one; return their positions.

    Each has the fewest records in common with those already chosen (the first of equals).
    """
    used: set[int] = set()
    chosen: list[int] = []
    for _ in range(count):
        shared = [
            len(used.intersection(rows)) if i not in chosen else len(rows) + 1
            for i, rows in enumerate(candidates.tolist())
        ]
        chosen.append(int(np.argmin(shared)))
        used.update(candidates[chosen[-1]].tolist())
    return np.array(chosen)

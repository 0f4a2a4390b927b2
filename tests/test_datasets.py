import numpy as np
import pytest

from experiments import datasets
from experiments._run import UsageError

needs_data = pytest.mark.skipif(not datasets.SHARED.exists(), reason="prepared data is not here")


def test_mnist_5k_has_the_fixed_split():
    data = datasets.load("mnist-5k")
    assert data.train_images.shape == (3_500, 28, 28, 1)
    assert (len(data.public_images), len(data.test_images)) == (500, 1_000)
    assert (data.train_images.dtype, data.train_labels.dtype) == (np.float32, np.int32)
    assert data.train_images.min() == 0 and data.train_images.max() == 1
    images = np.concatenate([data.train_images, data.public_images, data.test_images])
    assert len(np.unique(images.reshape(5_000, -1), axis=0)) == 5_000
    labels = np.concatenate([data.train_labels, data.public_labels, data.test_labels])
    assert (np.bincount(labels) == 500).all()
    np.testing.assert_array_equal(data.test_labels, datasets.load("mnist-5k").test_labels)
    assert "3,500 private, 500 public" in data.source


def test_digits_and_options():
    data = datasets.load("digits", max_examples=40, num_public=30)
    assert data.image_shape == datasets.shape("digits") == (8, 8, 1)
    assert (len(data.train_labels), len(data.public_labels), len(data.test_labels)) == (40, 30, 40)
    whole = datasets.load("digits")
    sizes = len(whole.train_labels), len(whole.public_labels), len(whole.test_labels)
    assert sizes == (1_247, 200, 350)


def test_validation_takes_private_records_and_leaves_the_test_set_alone():
    data = datasets.load("digits")
    split = data.validation(100)
    np.testing.assert_array_equal(split.test_images, data.train_images[-100:])
    np.testing.assert_array_equal(split.train_labels, data.train_labels[:-100])
    assert "VALIDATION" in split.source
    other = data.validation(100, 2)
    np.testing.assert_array_equal(other.test_labels, data.train_labels[-300:-200])
    kept = [data.train_labels[:-300], data.train_labels[-200:]]
    np.testing.assert_array_equal(other.train_labels, np.concatenate(kept))
    for size, part in ((len(data.train_labels), 0), (len(data.train_labels) // 2, 2), (0, 0)):
        with pytest.raises(UsageError, match="--validation"):
            data.validation(size, part)


def test_anchors_have_the_shape_of_the_data(tmp_path):
    data = datasets.load("mnist-5k", max_examples=10)
    public = datasets.anchors("in-distribution", data, 20)
    np.testing.assert_array_equal(public, data.public_images[:20])
    digits = datasets.anchors("digits", data)
    assert digits.shape == (1_797, 28, 28, 1) and digits.dtype == np.float32
    assert 0 <= digits.min() and digits.max() <= 1
    pixels = np.random.RandomState(0).randint(0, 256, (5, 28, 28), np.uint8)
    np.save(tmp_path / "mine.npy", pixels)
    mine = datasets.anchors(str(tmp_path / "mine.npy"), data)
    np.testing.assert_allclose(mine[..., 0], pixels / 255, rtol=1e-6)


@needs_data
@pytest.mark.parametrize("name, count", [("tiny-imagenet", 2_000), ("imagenet", 1_000)])
def test_natural_image_anchors(name, count):
    data = datasets.load("mnist-5k", max_examples=10)
    grey = datasets.anchors(name, data)
    assert grey.shape == (count, 28, 28, 1) and 0.3 < grey.mean() < 0.6


@needs_data
@pytest.mark.parametrize("name", ["mnist", "cifar10", "svhn_cropped"])
def test_prepared_folders_are_read_and_decoded_once(name, tmp_path, monkeypatch):
    monkeypatch.setenv("JDP_CACHE", str(tmp_path))
    data = datasets.load(name, max_examples=20, num_public=10)
    assert data.train_images.shape == (20, *datasets.shape(name))
    assert data.public_images.shape[0] == 10 and data.test_images.shape[0] == 20
    files = sorted(tmp_path.iterdir())
    assert len(files) == (0 if name == "svhn_cropped" else 2)
    again = datasets.load(name, max_examples=20, num_public=10)
    np.testing.assert_array_equal(data.train_images, again.train_images)
    if name == "svhn_cropped":
        assert "TEST split" in data.source
        assert datasets.anchors("tiny-imagenet", data, 3).shape == (3, 32, 32, 3)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda d: datasets.load("imagenet"), "--dataset must be one of"),
        (lambda d: datasets.load("digits", max_examples=0), "--max-examples"),
        (lambda d: datasets.load("digits", num_public=-1), "--num-public"),
        (lambda d: datasets.load("digits", num_public=2_000), "leaves no private image"),
        (lambda d: datasets.anchors("noise", d), "--anchors must be one of"),
        (lambda d: datasets.anchors("missing.npy", d), "there is no missing.npy"),
        (lambda d: datasets.anchors("imagenet", d, data_dir="/nowhere"), "Give their folder"),
        (lambda d: datasets.anchors("in-distribution", d, 10_000), "--num-anchors"),
        (lambda d: datasets.anchors("digits", d), "private images themselves"),
    ],
)
def test_bad_input_is_named(call, message):
    data = datasets.load("digits", max_examples=10)
    with pytest.raises(UsageError, match=message):
        call(data)


def test_a_missing_data_set_says_what_to_do(tmp_path, monkeypatch):
    import tensorflow_datasets as tfds

    def refuse(*_, **__):
        raise OSError("no route to host")

    monkeypatch.setattr(tfds.core.DatasetBuilder, "download_and_prepare", refuse)
    with pytest.raises(UsageError, match="--data-dir"):
        datasets.load("mnist", data_dir=tmp_path)


def test_num_public_zero_leaves_no_anchors():
    data = datasets.load("digits", num_public=0)
    assert len(data.public_images) == 0
    with pytest.raises(UsageError, match="--num-public above 0"):
        datasets.anchors("in-distribution", data)

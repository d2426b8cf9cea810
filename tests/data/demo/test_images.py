import numpy as np
import pytest

from hf_attn_dynamics.data import embedded_images
from hf_attn_dynamics.data.demo.images import CROSS, DARK, LIGHT, NOISE, RING


@pytest.fixture(scope="module")
def drawn():
    """Images of a seed, cut into patches: (images, rows, columns, height, width) in levels of grey, and labels."""
    train, _ = embedded_images(train_size=2000, validation_size=1, seed=3)
    images = np.array(train["image"])
    assert images.shape == (2000, 16, 16, 3)
    assert 0 <= images.min() < DARK < LIGHT < images.max() <= 255
    assert (images == images[..., :1]).all()
    patches = images[..., 0].reshape(-1, 4, 4, 4, 4).swapaxes(2, 3).astype(float)
    return patches, np.array(train["label"]), train.features["label"].names


def drawing(lines):
    return np.where([[character == "#" for character in line] for line in lines], LIGHT, DARK)


def places(patches, lines):
    """Row and column of the patch that is most like a drawing."""
    distance = ((patches - drawing(lines)) ** 2).sum((-1, -2)).reshape(len(patches), -1)
    return np.divmod(distance.argmin(1), 4)


def test_the_class_is_where_the_cross_lies_as_seen_from_the_ring(drawn):
    patches, labels, names = drawn
    rows, columns = places(patches, CROSS)
    ring_rows, ring_columns = places(patches, RING)
    assert (rows != ring_rows).all()
    assert (columns != ring_columns).all()
    expected = [
        f"{'below' if below else 'above'} {'right' if right else 'left'}"
        for below, right in zip(rows > ring_rows, columns > ring_columns)
    ]
    assert [names[label] for label in labels] == expected


def test_images_of_all_classes_have_the_same_patches(drawn):
    patches, labels, _ = drawn
    ordered = np.sort(patches.mean((-1, -2)).reshape(len(patches), -1), axis=1)
    means = np.stack([ordered[labels == label].mean(0) for label in range(4)])
    np.testing.assert_allclose(means, means[:1].repeat(4, 0), atol=1)
    flat = np.abs(patches - DARK).mean((-1, -2)).reshape(len(patches), -1)
    assert ((flat > 2 * NOISE).sum(1) == 2).all()


def test_classes_are_equally_likely_and_every_place_occurs(drawn):
    patches, labels, _ = drawn
    np.testing.assert_allclose(np.bincount(labels) / len(labels), 0.25, atol=0.03)
    for lines in (CROSS, RING):
        rows, columns = places(patches, lines)
        assert len(set(zip(rows, columns))) == 16


def test_the_same_seed_draws_the_same_images():
    first, again, other = (embedded_images(5, 3, seed=seed) for seed in (0, 0, 1))
    for one, two, three in zip(first, again, other):
        assert one[:] == two[:] != three[:]
    assert first[0][0] != first[1][0]


@pytest.mark.parametrize("name", ["train_size", "validation_size"])
def test_no_images_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        embedded_images(**{name: 0})

# Licensed under the Apache License, Version 2.0.
"""Small images with two marks, whose class is their relative position, which no single patch determines."""

import numpy as np
from datasets import Array3D, ClassLabel, Dataset, Features

from .checks import check_positive


PATCH = 4  # side of a patch in pixels; each mark fills one patch
PATCHES_A_SIDE = 4
SIDE = PATCH * PATCHES_A_SIDE
CLASSES = ("above left", "above right", "below left", "below right")
CROSS = ("#..#", ".##.", ".##.", "#..#")
RING = ("####", "#..#", "#..#", "####")
LIGHT, DARK, NOISE = 192, 64, 16  # grey levels, and standard deviation of the noise


def embedded_images(train_size: int = 4000, validation_size: int = 1000, seed: int = 0) -> tuple[Dataset, Dataset]:
    """Synthetic images whose class is the position of a cross relative to a ring, with four classes.

    Images are grey and have 16 × 16 pixels in 4 × 4 patches. One patch has a cross and one a ring, in different rows
    and columns; all others are empty, and every pixel is noisy. Images of all classes consist of the same patches, so
    that a model must relate the positions of both marks.

    Args:
        train_size (`int`): Number of training images.
        validation_size (`int`): Number of validation images from the same distribution.
        seed (`int`): Random seed.

    Returns:
        `tuple[datasets.Dataset, datasets.Dataset]`: training and validation, with the columns `image` (uint8, with
        height, width and three equal channels) and `label` (`ClassLabel`); classes are equally likely.

    Raises:
        ValueError: if a number is less than 1.

    Example:
        >>> train, validation = embedded_images(train_size=3, validation_size=1)
        >>> train.features["label"].names
        ['above left', 'above right', 'below left', 'below right']
        >>> train.with_format("numpy")[0]["image"].shape
        (16, 16, 3)
    """
    check_positive(train_size=train_size, validation_size=validation_size)
    generator = np.random.default_rng(seed)
    train, validation = (_draw(size, generator) for size in (train_size, validation_size))
    return train, validation


def _draw(size: int, generator: np.random.Generator) -> Dataset:
    # Rows and columns of the cross and of the ring; the two rows differ, and so do the two columns.
    places = generator.permuted(np.tile(np.arange(PATCHES_A_SIDE), (size, 2, 1)), axis=2)[:, :, :2]
    images = np.full((size, PATCHES_A_SIDE, PATCH, PATCHES_A_SIDE, PATCH), DARK, dtype=np.float64)
    for which, drawing in enumerate((CROSS, RING)):
        lines = np.array([[character == "#" for character in line] for line in drawing])
        rows, columns = places[:, :, which].T
        images[np.arange(size), rows, :, columns] = np.where(lines, LIGHT, DARK)
    images = images.reshape(size, SIDE, SIDE, 1) + generator.normal(scale=NOISE, size=(size, SIDE, SIDE, 1))
    is_below, is_right = (places[:, :, 0] > places[:, :, 1]).T
    features = Features({"image": Array3D((SIDE, SIDE, 3), "uint8"), "label": ClassLabel(names=list(CLASSES))})
    pixels = np.repeat(images.round().clip(0, 255).astype(np.uint8), 3, axis=3)
    return Dataset.from_dict({"image": list(pixels), "label": (2 * is_below + is_right).tolist()}, features=features)

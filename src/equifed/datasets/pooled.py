"""Pools of samples without owners, divided by a partition: images, or your arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.partitions import Imbalance, Partition, build_partition, cut_points
from equifed.data.split import Array, DataError, Rows, Split, refuse
from equifed.datasets.files import (
    RemoteFile,
    as_images,
    checksums,
    find,
    read_cifar_archive,
    read_cifar_mosaics,
    read_idx,
)

Pool = tuple[Array, Array]
Spec = Partition | str | Mapping[str, Any]

ARRAYS = ("x_train", "y_train", "x_test", "y_test")
TEN_IID: dict[str, Any] = {"name": "iid", "clients": 10}


def _idx_files(folder: str, url: str, sums: str) -> tuple[RemoteFile, ...]:
    names = [
        f"{s}-{k}.gz" for s in ("train", "t10k") for k in ("images-idx3-ubyte", "labels-idx1-ubyte")
    ]
    pairs = zip(names, sums.split(), strict=True)
    return tuple(RemoteFile(folder, name, f"{url}/{name}", sha256) for name, sha256 in pairs)


MNIST_FILES = _idx_files(
    "mnist",
    "https://ossci-datasets.s3.amazonaws.com/mnist",
    """440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609
    3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c
    8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6
    f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6""",
)
FASHION_FILES = _idx_files(
    "fashion_mnist",
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion",
    """3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84
    a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845
    346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073
    67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5""",
)
CIFAR_FILES = (
    RemoteFile(
        "cifar10",
        "cifar-10-binary.tar.gz",
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    ),
)
FASHION_CLASSES = (
    *("T-shirt", "trouser", "pullover", "dress", "coat"),
    *("sandal", "shirt", "sneaker", "bag", "ankle boot"),
)
CIFAR_CLASSES = (
    *("airplane", "automobile", "bird", "cat", "deer"),
    *("dog", "frog", "horse", "ship", "truck"),
)


def mnist(*, partition: Spec = TEN_IID, seed: int = 0, samples: int | None = None) -> Federation:
    """MNIST digits, divided by a partition.

    60,000 training and 10,000 test images (1, 28, 28) in [0, 1], ten classes.

    Parameters
    ----------
    partition : Partition, name or mapping
        How to divide the training images among clients (see
        :func:`equifed.data.partitions.build_partition`); test images follow in proportion, class
        by class.
    samples : int, optional
        Use only the first training images, and a sixth as many test images.
    """
    return _load_idx(
        "mnist", MNIST_FILES, partition, seed, samples, tuple("0123456789"), "CC BY-SA 3.0"
    )


def fashion_mnist(
    *, partition: Spec = TEN_IID, seed: int = 0, samples: int | None = None
) -> Federation:
    """Fashion-MNIST, divided by a partition.

    As many images as MNIST, of the same shape; parameters as for :func:`mnist`.
    """
    return _load_idx(
        "fashion-mnist", FASHION_FILES, partition, seed, samples, FASHION_CLASSES, "MIT"
    )


def cifar10(
    *,
    partition: Spec = TEN_IID,
    seed: int = 0,
    samples: int | None = None,
    standardised: bool = False,
) -> Federation:
    """CIFAR-10, divided by a partition.

    50,000 training and 10,000 test images (3, 32, 32) in [0, 1]. Reads ``cifar-10-binary.tar.gz``
    as published, or lossless mosaics ``data_batch_1.webp`` ... with ``labels.npz``.
    ``standardised`` subtracts the training mean and divides by the training deviation of each
    colour. Other parameters as for :func:`mnist`.
    """
    return _colours(
        "cifar10", *_read_cifar(), CIFAR_CLASSES, partition, seed, samples, standardised
    )


def cifar100(
    *,
    partition: Spec = TEN_IID,
    seed: int = 0,
    samples: int | None = None,
    standardised: bool = False,
) -> Federation:
    """CIFAR-100, divided by a partition.

    As CIFAR-10 with 100 fine classes. Reads lossless mosaics ``train_1.webp`` ... ``test.webp``
    with ``labels.npz`` and ``fine_names.txt`` in the folder ``cifar100`` of ``EQUIFED_DATA``.
    """
    mosaic = find("cifar100", "test.webp")
    if mosaic is None:
        raise DataError("There is no cifar100/test.webp in the folder EQUIFED_DATA; put it there.")
    names = [*(f"train_{k}" for k in range(1, 6)), "test"]
    pools = read_cifar_mosaics(mosaic.parent, names, "_fine")
    classes = tuple((mosaic.parent / "fine_names.txt").read_text("utf-8").split())
    paths = sorted(mosaic.parent.glob("*.webp"))
    return _colours("cifar100", pools, paths, classes, partition, seed, samples, standardised)


def _colours(
    name: str, pools: dict[str, Pool], paths: list[Path], classes: tuple[str, ...],
    partition: Spec, seed: int, samples: int | None, standardised: bool,
) -> Federation:  # fmt: skip
    scaled = [
        (x.reshape(-1, 3, 32, 32).astype(np.float32) / np.float32(255), y)
        for x, y in _cut(pools["train"], pools["test"], samples)
    ]
    if standardised:
        mean = scaled[0][0].mean((0, 2, 3), dtype=np.float64).astype(np.float32)[:, None, None]
        deviation = scaled[0][0].std((0, 2, 3), dtype=np.float64).astype(np.float32)[:, None, None]
        scaled = [((x - mean) / deviation, y) for x, y in scaled]
    source = {"publisher": "A. Krizhevsky 2009", "licence": "none stated; research use"}
    about = source | checksums(paths)
    return divide(name, scaled[0], scaled[1], partition, seed, classes, about)


def arrays(
    path: str | Path, partition: Spec = TEN_IID, seed: int = 0, samples: int | None = None
) -> Federation:
    """Your arrays in an .npz file, divided by a partition.

    The file holds ``x_train`` and ``y_train``, ``x_test`` and ``y_test``: one sample a row, labels
    as whole numbers from 0 (frozen features of a network, say). ``about``, a text in it, goes into
    the federation's source. Other parameters as for :func:`mnist`.
    """
    path = Path(path)
    if not path.exists():
        raise DataError(f"There is no file {path}; give an .npz file with {', '.join(ARRAYS)}.")
    with np.load(path, allow_pickle=False) as stored:
        if missing := [name for name in ARRAYS if name not in stored]:
            raise DataError(f"{path} lacks {', '.join(missing)}; it has {', '.join(stored)}.")
        train, test = ((stored[f"x_{k}"], stored[f"y_{k}"]) for k in ("train", "test"))
        about = {"about": str(stored["about"])} if "about" in stored else {}
    refuse(
        ((k, *map(len, pool)) for k, pool in (("train", train), ("test", test))
         if len(pool[0]) != len(pool[1])),
        lambda odd: f"{path}: x_{odd[0]} has {odd[1]} rows, y_{odd[0]} {odd[2]} labels.",
    )  # fmt: skip
    classes = tuple(str(k) for k in range(int(max(train[1].max(), test[1].max())) + 1))
    pools = _cut(train, test, samples)
    return divide(path.stem, *pools, partition, seed, classes, about | checksums([path]))


def divide(
    name: str, train: Pool, test: Pool, partition: Spec, seed: int, class_names: tuple[str, ...],
    source: dict[str, str],
) -> Federation:  # fmt: skip
    """Divide a pool by a partition; test samples follow the training samples class by class."""
    chosen, stream = build_partition(partition), Stream(seed).at("partition")
    labels = train[1].astype(np.int64)
    parts = chosen.assign(labels, stream)
    # Imbalance removes training samples only, so test samples follow the division before it.
    whole = chosen.base.assign(labels, stream) if isinstance(chosen, Imbalance) else parts
    held = follow(whole, labels, test[1].astype(np.int64), stream)
    width = len(str(len(parts) - 1))
    return Federation(
        name=name,
        names=tuple(f"client {i:0{width}d}" for i in range(len(parts))),
        train=deal(train, parts),
        test=deal(test, held),
        classes=len(class_names),
        class_names=class_names,
        source=source | {"partition": repr(chosen), "partition seed": str(seed)},
    )


def follow(parts: Sequence[Rows], labels: Rows, held_labels: Rows, stream: Stream) -> list[Rows]:
    """Divide held-out samples so that every client meets the classes it trains on.

    The held-out samples of a class are shuffled and divided among the clients in proportion to
    their training samples of that class, so a client's held-out class mixture is that of its
    training samples up to rounding, and a client may end without held-out samples.

    >>> parts = [np.array([0, 1, 2]), np.array([3])]
    >>> held = follow(parts, np.zeros(4, dtype=int), np.zeros(8, dtype=int), Stream(0))
    >>> [len(rows) for rows in held]
    [6, 2]
    """
    pieces: list[list[Rows]] = [[np.empty(0, dtype=np.int64)] for _ in parts]
    for label in np.unique(held_labels):
        counts = np.array([np.count_nonzero(labels[rows] == label) for rows in parts])
        if not counts.any():
            continue
        draw = stream.at("held out", int(label)).generator()
        rows = draw.permutation(np.flatnonzero(held_labels == label))
        for i, piece in enumerate(np.split(rows, cut_points(counts / counts.sum(), len(rows)))):
            pieces[i].append(piece)
    return [np.sort(np.concatenate(piece)) for piece in pieces]


# -- small parts ----------------------------------------------------------------------------------


def _load_idx(
    name: str, files: tuple[RemoteFile, ...], partition: Spec, seed: int, samples: int | None,
    class_names: tuple[str, ...], licence: str,
) -> Federation:  # fmt: skip
    paths = [find(f.folder, f.name.removesuffix(".gz")) or f.obtain() for f in files]
    x, y, held_x, held_y = map(read_idx, paths)
    if len(x) != len(y) or len(held_x) != len(held_y):
        raise DataError(f"{name}: images and labels differ in number; fetch the files again.")
    train, test = ((as_images(x), y) for x, y in _cut((x, y), (held_x, held_y), samples))
    source = {"publisher": files[0].url.rsplit("/", 1)[0], "licence": licence}
    return divide(name, train, test, partition, seed, class_names, source | checksums(paths))


def _read_cifar() -> tuple[dict[str, Pool], list[Path]]:
    mosaic = find("cifar10", "test_batch.webp")
    if mosaic and CIFAR_FILES[0].find() is None:
        return dict(read_cifar_mosaics(mosaic.parent)), sorted(mosaic.parent.glob("*.webp"))
    path = CIFAR_FILES[0].obtain()
    return dict(read_cifar_archive(path)), [path]


def deal(pool: Pool, parts: list[Rows]) -> Split:
    """Return a split in which client i holds the rows ``parts[i]`` of a pool."""
    whole = np.array([0, len(pool[1])], dtype=np.int64)
    return Split(pool[0], pool[1].astype(np.int64), whole).take(parts)


def _cut(train: Pool, test: Pool, samples: int | None) -> tuple[Pool, Pool]:
    """Return the first training samples, and a sixth as many test samples."""
    if samples is None:
        return train, test
    if samples < 1:
        raise DataError(f"samples must be at least 1, got {samples}.")
    held = max(1, samples // 6)
    return (train[0][:samples], train[1][:samples]), (test[0][:held], test[1][:held])

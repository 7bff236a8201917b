"""Data with natural owners: vehicle sensors, writers of FEMNIST, speaking roles of Shakespeare."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from equifed.contract.streams import Stream
from equifed.data.checks import DataError
from equifed.data.federation import Federation, Split
from equifed.datasets.files import RemoteFile, checksums, find
from equifed.datasets.formats import read_leaf
from equifed.datasets.plays import CHARACTERS, Roles, read_gutenberg, read_moby

Tokens = NDArray[np.int64]

VEHICLE_FILES = (
    RemoteFile(
        "vehicle",
        "mytrain.json",
        "https://raw.githubusercontent.com/litian96/ditto/602f571de561f7796104860108dfa91182bfbcd8"
        "/data/vehicle/data/train/mytrain.json",
        "a8c8b22a89ea64e5a563cffe94352b48c1f44a02100fd3256adfc09dc43d9ddc",
        3879378,
    ),
)
FEMNIST_CLASSES = tuple(
    "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
)
LENGTH = 80  # characters a prediction sees, as in LEAF

_TOKEN_OF_BYTE = np.full(256, CHARACTERS.index(" "), dtype=np.int64)
_TOKEN_OF_BYTE[np.frombuffer(CHARACTERS.encode("latin-1"), dtype=np.uint8)] = np.arange(
    len(CHARACTERS)
)


def vehicle(*, test: float = 0.2, validation: float = 0.0, seed: int = 0) -> Federation:
    """Tell vehicles apart by 23 sensors, which are the clients: 100 features, two classes.

    The training file of Ditto, a subset (1,860 of about 43,700 samples) of the data of Duarte and
    Hu (2004), standardised sensor by sensor before the subset was drawn. Labels -1 and +1 become 0
    and 1. There is no published test part: ``test`` and ``validation`` hold out fractions of each
    sensor's samples, drawn with ``seed``.
    """
    path = find("vehicle", "vehicle_ditto_train.json.gz") or VEHICLE_FILES[0].obtain()
    clients = {
        name: (
            np.array(samples["x"], dtype=np.float32),
            (np.array(samples["y"]).ravel() > 0).astype(np.int64),
        )
        for name, samples in read_leaf([path]).items()
    }
    return Federation.from_clients(
        clients,
        name="vehicle",
        classes=2,
        class_names=("-1", "+1"),
        source={
            "publisher": "M. Duarte and Y. H. Hu 2004; sample of github.com/litian96/ditto",
            "licence": "none stated; research use",
            **checksums([path]),
        },
    ).split(validation=validation, test=test, seed=seed)


def femnist(*, writers: int | None = None, seed: int = 0) -> Federation:
    """Handwritten digits and letters by writer: images (1, 28, 28) in [0, 1], 62 classes.

    Reads ``femnist_leaf_subset.npz`` (105 writers), or the folders ``train`` and ``test`` of LEAF
    JSON files that LEAF's scripts write. Paper is 1, ink 0, as in LEAF.

    Parameters
    ----------
    writers : int, optional
        Use only that many writers, drawn at random.
    seed : int
        Seed of that draw.
    """
    stored, folder = find("femnist", "femnist_leaf_subset.npz"), find("femnist", "train")
    if stored:
        names, splits, paths = *_femnist_arrays(stored), [stored]
    elif folder:
        names, splits, paths = _leaf_splits(folder, _leaf_image)
    else:
        raise DataError(
            "femnist is not on this machine and has no single file to fetch. Run LEAF's "
            "data/femnist/preprocess.sh -s niid (github.com/TalwalkarLab/leaf) and put its "
            "folders train and test into $EQUIFED_DATA/femnist."
        )
    federation = Federation(
        name="femnist",
        names=names,
        train=splits["train"],
        test=splits["test"],
        classes=62,
        class_names=FEMNIST_CLASSES,
        source={
            "publisher": "NIST SD-19; Cohen et al. 2017; LEAF, Caldas et al. 2018",
            "licence": "US government work; LEAF: BSD-2-Clause",
            **checksums(paths),
        },
    )
    return _drawn(federation, writers, seed)


def shakespeare(
    *,
    edition: Literal["moby", "gutenberg", "leaf"] = "moby",
    roles: int | None = None,
    stride: int = LENGTH,
    test: float = 0.2,
    min_samples: int = 2,
    seed: int = 0,
) -> Federation:
    """Predict the next character of a speaking role from the 80 before it; roles are the clients.

    A role's lines are joined by blanks. The last ``test`` fraction of its text is held out, so
    that no test window overlaps a training window. LEAF takes a window at every character
    (``stride=1``, some four million); by default windows do not overlap.

    Parameters
    ----------
    edition : {"moby", "gutenberg", "leaf"}
        The Moby edition is in the public domain. The Gutenberg edition of 1994, which LEAF uses,
        may be used for personal, non-commercial purposes only. ``leaf`` reads the folders
        ``train`` and ``test`` of JSON files that LEAF's scripts write, as they are.
    roles : int, optional
        Use only that many roles, drawn at random.
    stride : int
        Characters from one window to the next.
    test : float
        Fraction of each role's text to hold out.
    min_samples : int
        Leave out roles with fewer training windows, and those with two lines or less.
    seed : int
        Seed of the draw of roles.
    """
    if not (stride >= 1 and min_samples >= 1 and 0 <= test < 1):
        raise DataError(
            "shakespeare: stride and min_samples must be at least 1 and test in [0, 1), "
            f"got {stride}, {min_samples} and {test}."
        )
    if edition == "leaf":
        return _drawn(_leaf_shakespeare(), roles, seed)
    read, path, licence = _edition(edition)
    texts = _texts(read(path), stride, test, min_samples)
    names = _some(texts, roles, seed)
    clients = [
        (_samples(text[:cut], stride), _samples(text[cut:], stride))
        for text, cut in (texts[name] for name in names)
    ]
    train, held = (Split.from_clients([pair[k] for pair in clients]) for k in (0, 1))
    return Federation(
        name="shakespeare",
        names=names,
        train=train,
        test=held if test else None,
        classes=len(CHARACTERS),
        class_names=tuple(CHARACTERS),
        source={"publisher": f"{edition} edition", "licence": licence, **checksums([path])},
    )


def tokens(text: str) -> Tokens:
    """Return the tokens of a text; characters outside LEAF's 80 count as blanks.

    >>> [CHARACTERS[t] for t in tokens("To|be")]
    ['T', 'o', ' ', 'b', 'e']
    """
    return _TOKEN_OF_BYTE[np.frombuffer(text.encode("latin-1", "replace"), dtype=np.uint8)]


# -- small parts ----------------------------------------------------------------------------------


def _texts(
    roles: Roles, stride: int, test: float, min_samples: int
) -> dict[str, tuple[Tokens, int]]:
    """Return each role's text and where its held-out part begins, for roles with enough text."""
    texts = {}
    for name, lines in roles.items():
        text = tokens(re.sub("  +", " ", " ".join(lines)))
        cut = len(text) - int(test * len(text))
        if len(lines) > 2 and -((LENGTH - cut) // stride) >= min_samples:
            texts[name] = (text, cut)
    if not texts:
        raise DataError(f"shakespeare: no role has {min_samples} training windows.")
    return texts


def _samples(text: Tokens, stride: int) -> tuple[Tokens, Tokens]:
    if len(text) <= LENGTH:
        return np.empty((0, LENGTH), dtype=np.int64), np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)[::stride]
    return windows[:, :-1].copy(), windows[:, -1].copy()


def _edition(edition: str) -> tuple[Callable[[Path], Roles], Path, str]:
    known: dict[str, tuple[Callable[[Path], Roles], tuple[str, ...], str]] = {
        "moby": (read_moby, ("moby_shakespeare.tar.gz",), "public domain"),
        "gutenberg": (
            read_gutenberg,
            ("gutenberg_100_1994.txt.gz", "1994-01-100.zip", "100.txt"),
            "World Library: personal, non-commercial use only",
        ),
    }
    if edition not in known:
        raise DataError(f"shakespeare: edition must be moby, gutenberg or leaf, got {edition!r}.")
    read, names, licence = known[edition]
    for name in names:
        path = find("shakespeare", name)
        if path:
            return read, path, licence
    raise DataError(
        f"shakespeare: the {edition} edition is not on this machine and has no address whose "
        f"checksum is known; put {' or '.join(names)} into $EQUIFED_DATA/shakespeare."
    )


def _femnist_arrays(path: Path) -> tuple[tuple[str, ...], dict[str, Split]]:
    with np.load(path) as stored:
        names = tuple(str(name) for name in stored["writers"])
        splits = {}
        for label in ("train", "test"):
            owners = stored[f"writer_{label}"].astype(np.int64)
            order = np.argsort(owners, kind="stable")
            offsets = np.zeros(len(names) + 1, dtype=np.int64)
            np.cumsum(np.bincount(owners, minlength=len(names)), out=offsets[1:])
            images = stored[f"x_{label}"][order][:, None].astype(np.float32) / np.float32(255)
            splits[label] = Split(images, stored[f"y_{label}"][order].astype(np.int64), offsets)
    return names, splits


def _leaf_image(samples: Mapping[str, Any]) -> tuple[NDArray[np.float32], Tokens]:
    images = np.array(samples["x"], dtype=np.float32).reshape(-1, 1, 28, 28)
    return images, np.array(samples["y"], dtype=np.int64)


def _leaf_splits(
    train: Path, parse: Callable[[Mapping[str, Any]], tuple[Any, Tokens]]
) -> tuple[tuple[str, ...], dict[str, Split], list[Path]]:
    """Read the sibling folders ``train`` and ``test`` of LEAF JSON files."""
    paths = {label: sorted((train.parent / label).glob("*.json*")) for label in ("train", "test")}
    users = {label: read_leaf(files) for label, files in paths.items()}
    names = tuple(users["train"])
    nothing = parse({"x": [], "y": []})
    splits = {
        label: Split.from_clients(
            [parse(given[name]) if name in given else nothing for name in names]
        )
        for label, given in users.items()
    }
    return names, splits, [*paths["train"], *paths["test"]]


def _leaf_text(samples: Mapping[str, Any]) -> tuple[Tokens, Tokens]:
    windows = [tokens(text) for text in samples["x"]]
    inputs = np.array(windows, dtype=np.int64).reshape(len(windows), LENGTH)
    return inputs, tokens("".join(samples["y"]))


def _leaf_shakespeare() -> Federation:
    folder = find("shakespeare", "train")
    if folder is None:
        raise DataError(
            "shakespeare: put the folders train and test that LEAF's preprocess.sh writes for it "
            "into $EQUIFED_DATA/shakespeare, or choose another edition."
        )
    names, splits, paths = _leaf_splits(folder, _leaf_text)
    return Federation(
        name="shakespeare",
        names=names,
        train=splits["train"],
        test=splits["test"],
        classes=len(CHARACTERS),
        class_names=tuple(CHARACTERS),
        source={"publisher": "LEAF", "licence": "personal, non-commercial", **checksums(paths)},
    )


def _some(names: Iterable[str], count: int | None, seed: int) -> tuple[str, ...]:
    """Return ``count`` of the names, drawn at random, in their order; all of them if it is None."""
    everyone = tuple(names)
    if count is None:
        return everyone
    if not 1 <= count <= len(everyone):
        raise DataError(f"The number of clients must lie in 1..{len(everyone)}, got {count}.")
    draw = Stream(seed).at("some clients").generator()
    return tuple(everyone[i] for i in np.sort(draw.choice(len(everyone), count, replace=False)))


def _drawn(federation: Federation, count: int | None, seed: int) -> Federation:
    return federation if count is None else federation.subset(_some(federation.names, count, seed))

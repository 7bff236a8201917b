"""Data with natural owners: sensors, writers, people of a census, Shakespeare's roles."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

import numpy as np
from numpy.typing import NDArray

from equifed.contract.streams import Stream
from equifed.data.columns import group_rows, one_hot
from equifed.data.federation import Federation
from equifed.data.mapped import standardise
from equifed.data.split import Array, DataError, Rows, Split
from equifed.datasets.files import RemoteFile, as_images, checksums, find, read_leaf
from equifed.datasets.pooled import deal

Table = dict[str, list[str]]
Tokens = NDArray[np.int64]
Roles = dict[str, list[str]]  # role, as PLAY_ROLE, to its lines in order

DITTO = "https://raw.githubusercontent.com/litian96/ditto/602f571de561f7796104860108dfa91182bfbcd8"
VEHICLE_FILES = (
    RemoteFile("vehicle", "mytrain.json", f"{DITTO}/data/vehicle/data/train/mytrain.json",
               "a8c8b22a89ea64e5a563cffe94352b48c1f44a02100fd3256adfc09dc43d9ddc"),
)  # fmt: skip
UCI = "https://archive.ics.uci.edu/ml/machine-learning-databases/adult"
ADULT_FILES = tuple(
    RemoteFile("adult", name, f"{UCI}/{name}", sha256)
    for name, sha256 in (
        ("adult.data", "5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d"),
        ("adult.test", "a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05"),
    )
)

ADULT_COLUMNS = (
    *("age", "workclass", "fnlwgt", "education", "education-num", "marital-status", "occupation"),
    *("relationship", "race", "sex", "capital-gain", "capital-loss", "hours-per-week"),
    *("native-country", "income"),
)
ADULT_NUMBERS = (
    *("age", "fnlwgt", "education-num", "capital-gain", "capital-loss", "hours-per-week"),
)
ADULT_CATEGORIES = tuple(c for c in ADULT_COLUMNS[:-1] if c not in ADULT_NUMBERS)
FEMNIST_CLASSES = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")


def vehicle(*, test: float = 0.2, validation: float = 0.0, seed: int = 0) -> Federation:
    """Vehicle sensors: 23 clients, 1,860 samples of 100 features, two classes.

    The sensors, which are the clients, tell two kinds of vehicles apart. The training file of
    Ditto, a subset (1,860 of about 43,700 samples) of the data of Duarte and Hu (2004),
    standardised sensor by sensor before the subset was drawn. Labels -1 and +1 become 0 and 1.
    There is no published test part: ``test`` and ``validation`` hold out fractions of each sensor's
    samples, drawn with ``seed``.
    """
    path = find("vehicle", "vehicle_ditto_train.json.gz") or VEHICLE_FILES[0].obtain()
    clients = {
        name: (np.array(held["x"], dtype=np.float32), (np.ravel(held["y"]) > 0).astype(np.int64))
        for name, held in read_leaf([path]).items()
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
    """Handwritten characters of 105 writers, 62 classes.

    Digits and letters, images (1, 28, 28) in [0, 1], by writer. Reads ``femnist_leaf_subset.npz``
    (105 writers), or the folders ``train`` and ``test`` of LEAF JSON files that LEAF's scripts
    write. Paper is 1, ink 0, as in LEAF.

    Parameters
    ----------
    writers : int, optional
        Use only that many writers, drawn at random.
    """
    stored, folder = find("femnist", "femnist_leaf_subset.npz"), find("femnist", "train")
    if stored:
        names, splits, paths = *_read_femnist(stored), [stored]
    elif folder:
        names, splits, paths = _read_leaf_folders(folder)
    else:
        raise DataError(
            "femnist is not on this machine and has no single file to fetch. Run LEAF's "
            "data/femnist/preprocess.sh -s niid (github.com/TalwalkarLab/leaf) and put its "
            "folders train and test into $EQUIFED_DATA/femnist."
        )
    whole = Federation(
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
    return whole if writers is None else whole.subset(choose_names(names, writers, seed))


def adult(*, clients: str = "doctorate") -> Federation:
    """UCI Adult (census income): clients by education or another column.

    Whether a person of the 1994 census earns more than 50,000 dollars a year. Numbers are
    standardised with the training rows, categories become 0/1 columns (one for each value of the
    training file, the missing mark ``?`` included; nothing is dropped).

    Parameters
    ----------
    clients : str
        ``doctorate`` for the two clients of AFL and q-FFL (people with a doctorate, and all
        others), or a column whose values are the clients, such as ``race`` or ``education``.
    """
    paths = [file.obtain() for file in ADULT_FILES]
    train, test = (read_adult(path) for path in paths)
    categories = {c: sorted(set(train[c])) for c in ADULT_CATEGORIES}
    pools = [_encode_adult(table, categories) for table in (train, test)]
    source = {"publisher": "B. Becker and R. Kohavi 1996, UCI", "licence": "CC BY 4.0"}
    here, there = (group_rows(_name_owners(table, clients)) for table in (train, test))
    federation = Federation(
        name="adult",
        names=tuple(here),
        train=deal(pools[0], list(here.values())),
        test=deal(pools[1], [there.get(name, np.empty(0, dtype=np.int64)) for name in here]),
        classes=2,
        class_names=("<=50K", ">50K"),
        source=source | checksums(paths),
    )
    return standardise(federation, range(len(ADULT_NUMBERS)))


def read_adult(path: Path) -> Table:
    """Read ``adult.data`` or ``adult.test``: fields separated by comma and blank, no header."""
    text = path.read_text(encoding="utf-8")
    rows = [line.rstrip(".").split(", ") for line in text.splitlines() if line.count(", ") > 1]
    if {len(row) for row in rows} != {len(ADULT_COLUMNS)}:
        raise DataError(
            f"{path} is not the Adult table: expected {len(ADULT_COLUMNS)} fields a row."
        )
    return {
        name: list(cells)
        for name, cells in zip(ADULT_COLUMNS, zip(*rows, strict=True), strict=True)
    }


def _encode_adult(table: Table, categories: dict[str, list[str]]) -> tuple[Array, Rows]:
    numbers = np.array([table[c] for c in ADULT_NUMBERS], dtype=np.float64).T
    blocks = [numbers, *(one_hot(table[c], values) for c, values in categories.items())]
    labels = np.array([value == ">50K" for value in table["income"]], dtype=np.int64)
    return np.hstack(blocks).astype(np.float32), labels


def _name_owners(table: Table, clients: str) -> list[str]:
    if clients == "doctorate":
        return ["doctorate" if v == "Doctorate" else "other" for v in table["education"]]
    if clients not in ADULT_CATEGORIES:
        raise DataError(
            f"adult: clients must be doctorate or one of {', '.join(ADULT_CATEGORIES)}, "
            f"got {clients!r}."
        )
    return list(table[clients])


def _read_femnist(path: Path) -> tuple[tuple[str, ...], dict[str, Split]]:
    with np.load(path) as stored:
        names = tuple(str(name) for name in stored["writers"])
        splits = {}
        for label in ("train", "test"):
            owners = stored[f"writer_{label}"]
            pool = as_images(stored[f"x_{label}"]), stored[f"y_{label}"]
            splits[label] = deal(pool, [np.flatnonzero(owners == k) for k in range(len(names))])
    return names, splits


def _read_leaf_folders(train: Path) -> tuple[tuple[str, ...], dict[str, Split], list[Path]]:
    """Read the sibling folders ``train`` and ``test`` of LEAF JSON files."""
    paths = {label: sorted((train.parent / label).glob("*.json*")) for label in ("train", "test")}
    users = {label: read_leaf(files) for label, files in paths.items()}
    names, splits = tuple(users["train"]), {}
    for label, given in users.items():
        held = [given.get(name, {"x": [], "y": []}) for name in names]
        images = [np.array(s["x"], dtype=np.float32).reshape(-1, 1, 28, 28) for s in held]
        labels = [np.array(s["y"], dtype=np.int64) for s in held]
        splits[label] = Split.from_clients(list(zip(images, labels, strict=True)))
    return names, splits, [*paths["train"], *paths["test"]]


def choose_names(names: Iterable[str], count: int | None, seed: int) -> tuple[str, ...]:
    """Return ``count`` of the names, drawn at random, in their order; all of them if it is None."""
    everyone = tuple(names)
    if count is None:
        return everyone
    if not 1 <= count <= len(everyone):
        raise DataError(f"The number of clients must lie in 1..{len(everyone)}, got {count}.")
    draw = Stream(seed).at("some clients").generator()
    return tuple(everyone[i] for i in np.sort(draw.choice(len(everyone), count, replace=False)))


# -- Shakespeare -----------------------------------------------------------------------------------

CHARACTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
"""The 80 characters of LEAF; a character's token is its place here."""

MOBY = "moby_shakespeare.tar.gz"
LENGTH = 80  # characters a prediction sees, as in LEAF

_TOKEN_OF_BYTE = np.full(256, CHARACTERS.index(" "), dtype=np.int64)
_TOKEN_OF_BYTE[list(CHARACTERS.encode("latin-1"))] = np.arange(len(CHARACTERS))
_MOBY_SPEECH = re.compile(r"^([A-Z][A-Za-z'.&\- ]*)\t(.*)")
_MOBY_HEADINGS = re.compile(r"^(ACT|SCENE|PROLOGUE|EPILOGUE|INDUCTION|DRAMATIS)\b")
_DIRECTIONS = re.compile(r"\[[^\[\]]*\]")  # they may run over several lines


def shakespeare(
    *,
    roles: int | None = None,
    stride: int = LENGTH,
    test: float = 0.2,
    min_samples: int = 2,
    seed: int = 0,
) -> Federation:
    """Next character of some 1,100 speaking roles.

    Roles of the Moby edition are the clients; a character is predicted from the 80 before it. A
    role's lines are joined by blanks. The last ``test`` fraction of its text is held out, so that
    no test window overlaps a training window. LEAF takes a window at every character
    (``stride=1``, some four million); by default windows do not overlap.

    Parameters
    ----------
    roles : int, optional
        Use only that many roles, drawn at random.
    stride : int
        Characters from one window to the next.
    test : float
        Fraction of each role's text to hold out.
    min_samples : int
        Leave out roles with fewer training windows, and those with two lines or less.
    """
    if not (stride >= 1 and min_samples >= 1 and 0 <= test < 1):
        raise DataError(
            "shakespeare: stride and min_samples must be at least 1 and test in [0, 1), "
            f"got {stride}, {min_samples} and {test}."
        )
    path = find("shakespeare", MOBY)
    if path is None:
        raise DataError(
            "shakespeare is not on this machine and has no address whose checksum is known; put "
            f"{MOBY} into $EQUIFED_DATA/shakespeare."
        )
    texts = _join_lines(read_moby(path), stride, test, min_samples)
    names = choose_names(texts, roles, seed)
    chosen = [texts[name] for name in names]
    train = Split.from_clients([_cut_windows(text[:cut], stride) for text, cut in chosen])
    held = Split.from_clients([_cut_windows(text[cut:], stride) for text, cut in chosen])
    return Federation(
        name="shakespeare",
        names=names,
        train=train,
        test=held if test else None,
        classes=len(CHARACTERS),
        class_names=tuple(CHARACTERS),
        source={"publisher": "moby edition", "licence": "public domain"} | checksums([path]),
    )


def tokenise(text: str) -> Tokens:
    """Return the tokens of a text; characters outside LEAF's 80 count as blanks.

    >>> [CHARACTERS[t] for t in tokenise("To|be")]
    ['T', 'o', ' ', 'b', 'e']
    """
    return _TOKEN_OF_BYTE[np.frombuffer(text.encode("latin-1", "replace"), dtype=np.uint8)]


def _join_lines(
    roles: Roles, stride: int, test: float, min_samples: int
) -> dict[str, tuple[Tokens, int]]:
    """Return each role's text and where its held-out part begins, for roles with enough text."""
    texts = {}
    for name, lines in roles.items():
        text = tokenise(re.sub("  +", " ", " ".join(lines)))
        cut = len(text) - int(test * len(text))
        if len(lines) > 2 and -((LENGTH - cut) // stride) >= min_samples:
            texts[name] = (text, cut)
    if not texts:
        raise DataError(f"shakespeare: no role has {min_samples} training windows.")
    return texts


def _cut_windows(text: Tokens, stride: int) -> tuple[Tokens, Tokens]:
    if len(text) <= LENGTH:
        return np.empty((0, LENGTH), dtype=np.int64), np.empty(0, dtype=np.int64)
    windows = np.lib.stride_tricks.sliding_window_view(text, LENGTH + 1)[::stride]
    return windows[:, :-1].copy(), windows[:, -1].copy()


def read_moby(path: Path) -> Roles:
    """Read the Moby edition: a tar of plays, speakers in capitals before a tab.

    Stage directions in brackets are dropped; lines before the first act are the list of persons.
    """
    roles: Roles = {}
    try:
        with tarfile.open(path) as archive:
            for member in sorted(archive, key=lambda m: m.name):
                place = PurePosixPath(member.name)
                if member.isfile() and place.parent.name in ("comedies", "histories", "tragedies"):
                    file = archive.extractfile(member)
                    assert file is not None
                    text = file.read().decode("latin-1")
                    for character, lines in _read_play(text).items():
                        roles[re.sub(r"\W+", "_", f"{place.name}_{character}")] = lines
    except (OSError, EOFError, tarfile.TarError) as error:
        raise DataError(f"Cannot read {path}: {error}; fetch it again.") from None
    if not roles:
        raise DataError(f"{path} holds no plays of the Moby edition.")
    return roles


def _read_play(text: str) -> Roles:
    roles: Roles = {}
    speaker, begun = "", False
    for line in _DIRECTIONS.sub("", text).splitlines():
        speech = _MOBY_SPEECH.match(line)
        if _MOBY_HEADINGS.match(line):
            begun = begun or line.startswith(("ACT", "PROLOGUE", "INDUCTION"))
            speaker = line = ""
        elif speech:
            speaker, line = speech[1].strip().upper(), "\t" + speech[2]
        said = line[1:].replace("[", "").replace("]", "").strip()  # a bracket without its partner
        if begun and speaker and said and line.startswith("\t"):
            roles.setdefault(speaker, []).append(said)
    return roles

"""What needs no download: three data sets inside the package, and one that is generated."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal

import numpy as np

from equifed.contract.streams import Stream
from equifed.data.columns import read_columns
from equifed.data.federation import Federation
from equifed.data.mapped import standardise
from equifed.data.split import Array, DataError, Split, refuse, refuse_any
from equifed.datasets.files import as_images

EMBEDDED = Path(__file__).parent / "embedded"

FASHION_CLIENTS = {"T-shirt": "t_shirt", "pullover": "pullover", "shirt": "shirt"}

HEART_SITES = {
    "Cleveland": "cleveland",
    "Hungary": "hungarian",
    "Switzerland": "switzerland",
    "Long Beach": "va",
}
HEART_COLUMNS = (
    *("age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak"),
    *("slope", "ca", "thal", "num"),
)
HEART_USED = HEART_COLUMNS[:10]  # the other three are missing in most of three hospitals
HEART_CATEGORIES = {"cp": [1, 2, 3, 4], "restecg": [0, 1, 2]}
HEART_NUMBERS = [name for name in HEART_USED if name not in HEART_CATEGORIES]
HEART_CONTINUOUS = ("age", "trestbps", "chol", "thalach", "oldpeak")
HEART_GAPS = ("trestbps", "chol", "fbs", "thalach", "exang", "oldpeak")

PENGUIN_MEASURES = ("bill_length_mm", "bill_depth_mm", "flipper_length_mm", "body_mass_g")


def fashion_three(*, train: int = 1000, test: int = 500) -> Federation:
    """T-shirts, pullovers, shirts of Fashion-MNIST: 3 clients, one class each.

    The case of AFL (Mohri et al. 2019) and RC-FL: shirts are hard to tell from the other two, so a
    model of the average serves their client badly. Classes 0, 2 and 6 become 0, 1 and 2; images
    are (1, 28, 28) in [0, 1]. The package holds the first 1,000 training and 500 test images of
    each class, in published order; fewer may be asked for.
    """
    asked = (("train", train, 1000), ("test", test, 500))
    refuse(
        (given for given in asked if not 1 <= given[1] <= given[2]),
        lambda given: f"fashion-three: {given[0]} must lie in 1..{given[2]}, got {given[1]}.",
    )
    splits = {}
    with np.load(EMBEDDED / "fashion_three.npz") as stored:
        for label, count in (("train", train), ("test", test)):
            images = (as_images(stored[f"{k}_{label}"][:count]) for k in FASHION_CLIENTS.values())
            splits[label] = Split.from_clients([(x, [k] * count) for k, x in enumerate(images)])
    return Federation(
        name="fashion-three",
        names=tuple(FASHION_CLIENTS),
        train=splits["train"],
        test=splits["test"],
        classes=3,
        class_names=tuple(FASHION_CLIENTS),
        source={
            "publisher": "Zalando Research, Fashion-MNIST (Xiao, Rasul, Vollgraf 2017)",
            "licence": "MIT",
            "preparation": "classes 0, 2 and 6; first 1,000 training and 500 test images of each",
        },
    )


def heart_disease(
    *,
    missing: Literal["impute", "complete"] = "impute",
    test: float = 0.3,
    validation: float = 0.0,
    seed: int = 0,
) -> Federation:
    """UCI heart disease: 4 hospitals, 920 patients, ill or healthy.

    Whether a patient has heart disease, 0 or 1; hospitals are the clients. The first ten attributes
    are used; the other three are missing for most patients outside Cleveland. Chest pain type and
    resting ECG become 0/1 columns; age, blood pressure, cholesterol, heart rate and ST depression
    are standardised with the training numbers of all hospitals.

    Parameters
    ----------
    missing : {"impute", "complete"}
        ``impute`` keeps all 303 + 294 + 123 + 200 patients: a missing value takes the median of
        the training patients, and a 0/1 column says that it was missing. A cholesterol or blood
        pressure of 0 counts as missing (all of Switzerland's cholesterol is recorded as 0).
        ``complete`` keeps the patients with all ten attributes, zeros included, as FLamby does:
        303 + 261 + 46 + 130; it loses most Swiss patients.
    test, validation : float
        Fraction of each hospital's patients to hold out.
    """
    if missing not in ("impute", "complete"):
        raise DataError(f"heart-disease: missing must be 'impute' or 'complete', got {missing!r}.")
    complete, (sites, table) = missing == "complete", _read_hospitals()
    for name in () if complete else ("trestbps", "chol"):
        table[name][table[name] == 0] = np.nan  # nobody has a pressure or cholesterol of 0
    numbers = np.stack([table[name] for name in HEART_NUMBERS], axis=1)
    blocks = [table[name][:, None] == values for name, values in HEART_CATEGORIES.items()]
    blocks += [] if complete else [np.isnan([table[name] for name in HEART_GAPS]).T]
    used = ~np.isnan([table[name] for name in HEART_USED]).any(0) | (not complete)
    owned = {site: np.flatnonzero((sites == site) & used) for site in HEART_SITES}
    federation = Federation.from_clients(
        {
            site: (rows[:, None], (table["num"][rows] > 0).astype(int))
            for site, rows in owned.items()
        },
        name="heart-disease",
        class_names=("healthy", "ill"),
        source={
            "publisher": "UCI; A. Janosi (Budapest), W. Steinbrunn (Zurich), M. Pfisterer (Basel), "
            "R. Detrano (Long Beach and Cleveland), 1989",
            "licence": "CC BY 4.0",
            "preparation": f"first ten attributes, missing={missing}, standardised in training",
        },
    ).split(validation=validation, test=test, seed=seed)
    rows = {label: split.inputs[:, 0].astype(int) for label, split in federation.splits().items()}
    medians = np.nanmedian(numbers[rows["train"]], axis=0)
    features = np.hstack([np.where(np.isnan(numbers), medians, numbers), *blocks])
    federation = federation.with_inputs({label: features[mine] for label, mine in rows.items()})
    federation = standardise(federation, [HEART_NUMBERS.index(c) for c in HEART_CONTINUOUS])
    splits = federation.splits().items()
    return federation.with_inputs({k: s.inputs.astype(np.float32) for k, s in splits})


def _read_hospitals() -> tuple[Array, dict[str, Array]]:
    """Return the hospital of every patient, and the columns, NaN for a missing value."""
    files = {site: EMBEDDED / f"processed.{code}.data" for site, code in HEART_SITES.items()}
    lines = [(site, line) for site in files for line in files[site].read_text().splitlines()]
    cells = [[np.nan if c == "?" else float(c) for c in line.split(",")] for _, line in lines]
    columns = dict(zip(HEART_COLUMNS, np.array(cells).T, strict=True))
    return np.array([site for site, _ in lines]), columns


def penguins(
    *,
    clients: Literal["species", "island"] = "species",
    target: str = "sex",
    test: float = 0.3,
    validation: float = 0.0,
    seed: int = 0,
) -> Federation:
    """Palmer penguins: 3 species or islands, 333 penguins with 4 measurements.

    Only the 333 penguins without a missing value are used. The target is ``sex`` or ``species``
    (classes), or a measurement (regression); the features are the other measurements, standardised
    with the training numbers of all clients.

    Parameters
    ----------
    clients : {"species", "island"}
        Column that tells the clients.
    target : str
        Column to predict.
    test, validation : float
        Fraction of each client's penguins to hold out.
    """
    table = read_columns(EMBEDDED / "penguins.csv")
    complete = [None not in row for row in zip(*table.values(), strict=True)]
    table = table.take(np.flatnonzero(complete))
    refuse(
        ((k, name) for k, name in (("clients", clients), ("target", target)) if name not in table),
        lambda odd: f"penguins: {odd[0]} must be one of {', '.join(table)}, got {odd[1]!r}.",
    )
    federation = Federation.from_table(
        table,
        client=clients,
        target=target,
        features=[name for name in PENGUIN_MEASURES if name != target],
        scale=None,
        missing="error",
        task="regression" if target in PENGUIN_MEASURES else "classification",
        name="penguins",
        source={
            "publisher": "K. Gorman, Palmer Station LTER; Horst, Hill, Gorman 2020",
            "licence": "CC0",
            "preparation": f"complete rows; clients by {clients}, target {target}",
        },
    ).split(validation=validation, test=test, seed=seed)
    return standardise(federation)


MOST_NUMBERS = 2_000_000_000  # beyond this drawn data do not fit into memory

MOST_CLIENTS = 10_000_000  # beyond this nobody would wait for the draws of each


def synthetic_regression(
    *,
    clients: int = 5,
    features: int = 10,
    samples: int = 100,
    scale: float = 1.0,
    shift: float = 0.1,
    seed: int = 0,
) -> Federation:
    r"""Linear regression with a different true model per client (SCAFF-PD, Section 6.1).

    .. math:: a_i^j \sim N(0, I_d), \quad \hat x \sim N(0, c^2 I_d), \quad
       \delta_i \sim N(0, \sigma^2 I_d), \quad y_i^j = \langle a_i^j, \hat x + \delta_i \rangle

    Targets carry no noise. The paper gives N = 5, d = 10 and m = 100 but neither c nor
    :math:`\sigma`; we take 1 and 0.1. Use it with the model ``linear`` without bias and the loss
    ``squared``. Client i draws from its own address, so the first clients stay the same when
    more are asked for.

    Parameters
    ----------
    clients, features, samples : int
        N, d, and m for every client.
    scale, shift : float
        c and :math:`\sigma`: how large the common model is, and how far clients differ from it.

    Examples
    --------
    >>> fed = synthetic_regression(clients=2, features=3, samples=4)
    >>> fed.train.inputs.shape, fed.train.inputs.dtype
    ((8, 3), dtype('float64'))
    """
    counts = {"clients": clients, "features": features, "samples": samples}
    refuse(
        (name for name, count in counts.items() if count < 1),
        lambda name: f"synthetic-regression: {name} must be at least 1, got {counts[name]}.",
    )
    refuse_any(
        (clients * samples * features > MOST_NUMBERS or clients > MOST_CLIENTS,
         f"synthetic-regression: {clients} clients x {samples} samples x {features} features are "
         f"too many (at most {MOST_CLIENTS:,} clients, {MOST_NUMBERS:,} numbers); ask for fewer."),
        (not (0 <= scale < math.inf and 0 <= shift < math.inf),
         f"synthetic-regression: scale {scale} and shift {shift} must be finite and >= 0."),
    )  # fmt: skip
    stream = Stream(seed).at("synthetic-regression")
    common = scale * stream.at("model").generator().standard_normal(features)
    data = []
    for i in range(clients):
        draw = stream.at("client", i).generator()
        truth = common + shift * draw.standard_normal(features)
        inputs = draw.standard_normal((samples, features))
        data.append((inputs, np.asarray(inputs @ truth)))
    return Federation(
        name="synthetic-regression",
        names=tuple(f"client {i}" for i in range(clients)),
        train=Split.from_clients(data),
        source={"publisher": "generated", "reference": "SCAFF-PD, Section 6.1", "seed": str(seed)},
    )

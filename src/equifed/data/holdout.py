"""Which rows are held out: at random, whole groups, or the latest; never two splits for one."""

from __future__ import annotations

import datetime
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from equifed.contract.streams import Stream
from equifed.data.columns import group_rows, to_numbers
from equifed.data.split import DataError, Rows

Labels = NDArray[np.str_]


@dataclass(frozen=True)
class Holdout:
    """Fractions of every client's training samples to set aside.

    Parameters
    ----------
    validation, test : float
        Fraction of every client's samples.
    seed : int
        Seed of the draw.
    """

    validation: float = 0.0
    test: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        held = (self.validation, self.test)
        if not min(held) >= 0 or not sum(held) < 1:
            got = f"got {self.validation} and {self.test}."
            raise DataError(f"validation and test must leave something to train on, {got}")

    @property
    def wanted(self) -> bool:
        """Whether anything is held out."""
        return self.validation > 0 or self.test > 0

    def counts(self, rows: int) -> tuple[int, int]:
        """Return how many of a client's rows are for validation and test; one stays in training."""
        test = min(round(self.test * rows), rows - 1)
        return min(round(self.validation * rows), rows - 1 - test), test


def draw_rows(name: str, rows: int, holdout: Holdout) -> tuple[Rows, Rows, Rows]:
    """Return the positions of a client's training, validation and test rows, each in order.

    They are drawn without replacement from the address ``("split", client name)``: the same rows
    whatever other clients there are.
    """
    order = Stream(holdout.seed).at("split", name).generator().permutation(rows)
    validation, test = holdout.counts(rows)
    ends = [test, test + validation]
    tested, validated, trained = (np.sort(part) for part in np.split(order, ends))
    return trained, validated, tested


def divide_at_random(owners: Mapping[str, Rows], holdout: Holdout) -> Labels:
    """Return the split of every row, drawn client by client."""
    part = np.full(sum(map(len, owners.values())), "train", dtype="U10")
    for name, rows in owners.items():
        _, validated, tested = draw_rows(name, len(rows), holdout)
        part[rows[validated]], part[rows[tested]] = "validation", "test"
    return part


def divide_groups(owners: Mapping[str, Rows], groups: Sequence[Any], holdout: Holdout) -> Labels:
    """Return the split of every row, all rows of one group (a patient, say) in the same one.

    Groups are taken in random order while that brings a client nearer to its fractions. A group
    with rows at several clients is in one split at all of them.
    """
    part = np.full(len(groups), "train", dtype="U10")
    client = np.empty(len(groups), dtype=object)
    for name, rows in owners.items():
        client[rows] = name
    members = group_rows(groups, "The groups")
    several = {g: rows.tolist() for g, rows in members.items() if len(set(client[rows])) > 1}
    shared = _place_groups("", several, {}, holdout)
    where = {int(r): group for group, rows in members.items() for r in rows}
    for name, rows in owners.items():
        mine: dict[str, list[int]] = {}
        for row in rows.tolist():
            mine.setdefault(where[row], []).append(row)
        for group, label in _place_groups(name, mine, shared, holdout).items():
            part[mine[group]] = label
    return part


def _place_groups(
    name: str, mine: Mapping[str, list[int]], shared: Mapping[str, str], holdout: Holdout
) -> dict[str, str]:
    """Return the split of each group of one client."""
    places = {group: shared[group] for group in mine if group in shared}
    free = [group for group in mine if group not in shared]
    total = sum(map(len, mine.values()))
    wanted = {"test": holdout.test * total, "validation": holdout.validation * total}
    have = {
        label: sum(len(mine[g]) for g, put in places.items() if put == label) for label in wanted
    }
    alone = "train" not in places.values()  # then one group must stay
    order = Stream(holdout.seed).at("split groups", name).generator().permutation(len(free))
    for number, k in enumerate(order):
        group, size = free[k], len(mine[free[k]])
        last = alone and number == len(free) - 1 and "train" not in places.values()
        near = [label for label in wanted if abs(have[label] + size - wanted[label])
                < abs(have[label] - wanted[label])]  # fmt: skip
        label = near[0] if near and not last else "train"
        places[group] = label
        if label in have:
            have[label] += size
    return places


def divide_by_time(
    owners: Mapping[str, Rows], moments: NDArray[np.float64], holdout: Holdout
) -> Labels:
    """Return the split of every row: a client's last rows are for test, those before validation.

    Rows of one moment stay together, so that everything in a later split is later; the fractions
    are met as nearly as that allows.
    """
    part = np.full(len(moments), "train", dtype="U10")
    for rows in owners.values():
        order = rows[np.argsort(moments[rows], kind="stable")]
        cuts = np.flatnonzero(np.diff(moments[order]) > 0) + 1  # first row of each later moment
        validation, test = holdout.counts(len(order))
        end = _nearest(cuts, len(order) - test) if test else None
        start = _nearest(cuts[: np.searchsorted(cuts, end)] if end else cuts,
                         len(order) - test - validation) if validation else None  # fmt: skip
        if start is not None:
            part[order[start:]] = "validation"
        if end is not None:
            part[order[end:]] = "test"
    return part


def _nearest(cuts: NDArray[np.int64], wanted: int) -> int | None:
    return int(cuts[np.abs(cuts - wanted).argmin()]) if len(cuts) else None


def read_moments(name: str, values: Sequence[Any]) -> NDArray[np.float64]:
    """Return numbers, dates or ISO texts, none of them missing, as numbers that rise with time.

    >>> read_moments("day", ["2024-01-02", "2024-01-01"]).tolist()
    [1704153600.0, 1704067200.0]
    """
    numbers = to_numbers(values)
    if numbers is not None:
        return numbers
    zone = datetime.UTC
    found = []
    for value in values:
        exact = isinstance(value, np.datetime64)
        moment = value.astype("datetime64[us]").item() if exact else value
        try:
            if isinstance(moment, str):
                moment = datetime.datetime.fromisoformat(moment)
            elif isinstance(moment, datetime.date) and not isinstance(moment, datetime.datetime):
                moment = datetime.datetime.combine(moment, datetime.time())
            found.append(moment if moment.tzinfo else moment.replace(tzinfo=zone))
        except (ValueError, AttributeError, TypeError):
            raise DataError(
                f"Column {name!r} holds {str(value)!r:.60}, which is no number and no date like "
                "2024-05-31; convert it (pandas.to_datetime)."
            ) from None
    return np.array([moment.timestamp() for moment in found])


def find_duplicates(
    part: Labels,
    owners: Mapping[str, Rows],
    cells: Sequence[Sequence[Any]],
    numbers: NDArray[np.int64],
) -> str | None:
    """Say how many held-out rows equal a training row in all features and the target.

    ``numbers`` are the rows as the user counts them.
    """
    if (part == "train").all():
        return None
    client = np.empty(len(part), dtype=object)
    for name, rows in owners.items():
        client[rows] = name
    keys: list[Hashable] = list(zip(*cells, strict=True))
    trained: dict[Hashable, int] = {}
    for row in np.flatnonzero(part == "train").tolist():
        trained.setdefault(keys[row], row)
    held = [r for r in np.flatnonzero(part != "train").tolist() if keys[r] in trained]
    if not held:
        return None
    whose = list(dict.fromkeys(str(client[r]) for r in held))
    shown = ", ".join(f"row {numbers[r]} as row {numbers[trained[keys[r]]]}" for r in held[:3])
    return (
        f"{len(held)} held-out row(s) are duplicates of a training row in all features and the "
        f"target ({shown}{', ...' if len(held) > 3 else ''}; client(s) {', '.join(whose[:5])}"
        f"{', ...' if len(whose) > 5 else ''}); if they are the same cases, drop one of each, or "
        "give group= the column that tells cases apart."
    )

"""Look at a table and guess what its columns are; every guess says why."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from equifed.data.columns import Columns, to_numbers
from equifed.data.fit_preparation import is_date
from equifed.data.fit_target import combine_targets, describe_target
from equifed.data.prepared_columns import name_category
from equifed.data.remarks import (
    describe_numbers_as_text,
    find_leaks,
    find_spellings,
    refuse_numbered_clients,
    refuse_single_rows,
)
from equifed.data.split import DataError

CLIENTS = (
    *("client", "site", "hospital", "clinic", "centre", "center", "institution", "institute"),
    *("organisation", "organization", "participant", "silo", "party", "node", "bank", "branch"),
    *("school", "store", "shop", "factory", "plant", "country", "region", "state", "district"),
    *("city", "station", "device", "writer", "user", "owner", "source", "cohort", "group"),
)
"""Words in the name of the column that tells the clients, likeliest first."""

TARGETS = (
    *("target", "label", "class", "outcome", "y", "result", "response", "diagnosis", "disease"),
    *("ill", "died", "death", "dead", "mortality", "survived", "survival", "readmitted", "event"),
    *("churn", "default", "fraud", "income", "price", "score", "status"),
)
"""Words in the name of the column to predict, likeliest first."""

PEOPLE = ("patient", "subject", "person", "individual", "case", "customer", "user", "animal")
IDENTIFIERS = (
    *("id", "uuid", "guid", "key", "nr", "no", "number", "index", "record", "row", "mrn", "ssn"),
    *("account", "serial", *PEOPLE),
)
MOST_CLIENTS, MOST_CODES = 2000, 10
MOST_GROUPS = 20
"""Values of a column by which metrics can reasonably be reported."""
PAIRS = 5
"""How many more equal pairs must be expected than there are before that tells an identifier."""
FEW = 10
"""Texts with fewer rows may be too few for a category when some rows are held out."""


@dataclass(frozen=True)
class Look:
    """What one column holds: kind, rows with and without a value, different values and examples.

    ``most`` is how many rows the most frequent value has.
    """

    kind: Literal["numbers", "whole", "texts", "dates", "mixed", "empty", "other"]
    count: int
    gaps: int
    different: int
    most: int
    examples: tuple[str, ...]
    span: float = 0.0  # from the smallest to the largest number


@dataclass(frozen=True)
class Guess:
    """Which column is what, and why: ``left_out`` and ``remarks`` are for the user to read.

    ``codes`` are columns of few whole numbers, which may be categories; ``dates`` and ``groups``
    could divide the rows.
    """

    client: str
    target: str
    features: tuple[str, ...]
    task: Literal["classification", "regression"]
    left_out: Mapping[str, str]
    remarks: tuple[str, ...]
    categorical: tuple[str, ...] | Literal["auto"] = "auto"
    codes: tuple[str, ...] = ()
    dates: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()


def look_at(values: list[Any]) -> Look:
    """Return what a column holds.

    >>> look_at(["1", "2", None])
    Look(kind='whole', count=2, gaps=1, different=2, most=1, examples=('1', '2'), span=1.0)
    """
    present = [v for v in values if v is not None]
    counts = Counter(map(name_category, present))
    most = max(counts.values(), default=0)
    told = (len(present), len(values) - len(present), len(counts), most, tuple(counts)[:3])
    numbers = None if any(isinstance(v, bool | np.bool_) for v in present) else to_numbers(present)
    if not present:
        return Look("empty", *told)
    if numbers is not None:
        whole = bool(np.all(np.isfinite(numbers) & (numbers == np.round(numbers))))
        finite = numbers[np.isfinite(numbers)]
        span = float(np.ptp(finite)) if len(finite) else 0.0
        return Look("whole" if whole else "numbers", *told, span)
    if all(is_date(v) for v in present):
        return Look("dates", *told)
    if not all(isinstance(v, str | bool | np.bool_ | int | float | np.number) for v in present):
        return Look("other", *told)
    readable = [to_numbers([v]) is not None and not isinstance(v, bool) for v in present]
    if any(readable):
        odd = str(present[readable.index(False)])
        return Look("mixed", *told[:4], (str(present[readable.index(True)]), odd))
    return Look("texts", *told)


def guess_client(looks: Mapping[str, Look], rows: int) -> list[str]:
    """Return the columns that may tell the clients, the likeliest first."""
    fit = [
        name
        for name, look in looks.items()
        if look.kind in ("texts", "whole") and 2 <= look.different <= min(MOST_CLIENTS, rows // 2)
    ]
    named = [name for word in CLIENTS for name in fit if word in _words(name)]
    texts = [name for name in fit if looks[name].kind == "texts" and looks[name].different > 2]
    return list(dict.fromkeys([*named, *texts]))


def guess_target(looks: Mapping[str, Look], client: str) -> list[str]:
    """Return the columns that may be the target, the likeliest first."""
    fit = [
        name
        for name, look in looks.items()
        if name != client and look.kind in ("texts", "whole", "numbers") and look.different >= 2
        and not is_identifier(name, look)
    ]  # fmt: skip
    named = [name for word in TARGETS for name in fit if word in _words(name)]
    return list(dict.fromkeys([*named, *reversed(fit)]))


def guess_columns(columns: Columns, client: str, target: str) -> Guess:
    """Return what the other columns are, given the client and the target."""
    for name in (client, target):
        if name not in columns:
            raise DataError(f"The table has no column {name!r}; it has {', '.join(columns)}.")
    looks = {name: look_at(values) for name, values in columns.items()}
    if looks[target].different < 2:
        raise DataError(f"Column {target!r} has fewer than two different values: nothing to learn.")
    refuse_numbered_clients(client, columns[client])
    task = guess_task(target, columns[target])
    if task == "classification":
        refuse_single_rows(target, columns[target])
    left_out, remarks, groups, codes = {}, [], [], []
    features = [name for name in columns if name not in (client, target)]
    for name in features:
        many = looks[name].kind == "texts" and looks[name].different > MOST_CODES
        reason = describe_numbers_as_text(columns[name]) if many else None
        reason = reason or _reason(name, looks[name])
        if reason is None and _is_group(name, looks[name]):
            groups.append(name)
            reason = f"tells {looks[name].different} cases apart, with several rows each"
        if reason is not None:
            left_out[name] = reason
        elif looks[name].kind == "whole" and 3 <= looks[name].different <= MOST_CODES:
            codes.append(name)
            remarks.append(
                f"{name}: {looks[name].different} different whole numbers, taken as amounts; if "
                "they are codes, list the column in categorical"
            )
        if looks[name].gaps and reason is None:
            share = looks[name].gaps / len(columns[name])
            remarks.append(f"{name}: {looks[name].gaps} gaps ({share:.0%})")
    if looks[client].different == 1:
        remarks.append(f"{client}: there is only one client, {looks[client].examples[0]}")
    for name in (client, target):
        if looks[name].gaps:
            remarks.append(f"{looks[name].gaps} rows have no {name} and are left out")
    kept = tuple(name for name in features if name not in left_out)
    if not kept:
        told = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
        raise DataError(f"No column is left to predict from ({told}).")
    dates = tuple(name for name in features if looks[name].kind == "dates")
    for name in (client, *kept, target):
        remarks += find_spellings(name, columns[name])
    if task == "classification":
        remarks += find_leaks(columns, kept, target)
    more = tuple(codes), dates, tuple(groups)
    return Guess(client, target, kept, task, left_out, tuple(remarks), "auto", *more)


def choose_categories(guess: Guess, columns: Columns, chosen: Sequence[str]) -> Guess:
    """Return the guess with columns of numbers taken as categories, beside those of text."""
    if not chosen:
        return guess
    strange = [name for name in chosen if name not in guess.features]
    if strange:
        raise DataError(
            f"There is no feature {strange[0]!r}; there are {', '.join(guess.features)}."
        )
    texts = [name for name in guess.features if look_at(columns[name]).kind == "texts"]
    coded = tuple(name for name in guess.features if name in {*texts, *chosen})
    told = tuple(r for r in guess.remarks if not r.startswith(tuple(f"{c}: " for c in chosen)))
    return replace(guess, categorical=coded, remarks=told)


def guess_task(target: str, values: list[Any]) -> Literal["classification", "regression"]:
    """Return the task; whole numbers that could be either are taken as values."""
    present = [v for v in values if v is not None]
    told = describe_target(target, present)
    try:
        found = combine_targets(target, {"": told})
    except DataError:
        return "regression"  # more than 20 whole numbers, or with gaps between them
    return "regression" if found.classes is None else "classification"


def _reason(name: str, look: Look) -> str | None:
    """Say why a column is no feature, if it is none."""
    if look.kind == "empty":
        return "no value at all"
    if look.different == 1:
        return f"constant: always {look.examples[0]!r}"
    if look.kind == "dates":
        return "dates: turn them into days since a first day, a year or a month to use them"
    if look.kind == "other":
        return "neither numbers nor text"
    if look.kind == "mixed":
        number, text = look.examples
        return f"numbers and text, such as {number!r} and {text!r}: correct it to use it"
    if is_identifier(name, look):
        return f"an identifier: {look.different} different values in {look.count} rows"
    if look.kind == "texts" and look.different > max(20, look.count // 5):
        return f"free text: {look.different} different values in {look.count} rows"
    if look.kind == "texts" and look.most < FEW:
        return f"rare texts: the most frequent one has {look.most} rows"
    return None


def is_identifier(name: str, look: Look) -> bool:
    """Tell whether every row has a value of its own that means nothing; copies of rows do not help.

    Of whole numbers, by the name, or because amounts within that span would meet now and then:
    n^2 / (2 span) pairs of n amounts are expected to be equal, and hardly any is.
    """
    twice = look.count - look.different
    if look.count < 10 or twice > look.count // 10 or (twice and look.kind != "whole"):
        return False
    expected = look.count**2 / (2 * look.span) if look.span else 0.0
    crowded = expected > PAIRS * max(1, twice)
    named = bool(_words(name) & {*IDENTIFIERS})
    return look.kind == "texts" or (look.kind == "whole" and (named or crowded))


def find_numbered_rows(columns: Columns, used: Sequence[str]) -> list[str]:
    """Name the features that seem to count rows, not to measure anything."""
    looks = {name: look_at(columns[name]) for name in used}
    return [
        f"column {name!r} is used as a feature but looks like an identifier ({look.different} "
        f"different whole numbers in {look.count} rows); if it is one, list the other columns in "
        "features"
        for name, look in looks.items()
        if look.kind == "whole" and is_identifier(name, look)
    ]


def find_misused_groups(columns: Columns, groups: str | None, group: str | None) -> list[str]:
    """Warn of a column given as ``groups`` that seems to tell people apart, not kinds of people.

    >>> told = find_misused_groups({"patient": [k // 3 for k in range(90)]}, "patient", None)
    >>> told[0][:61]
    "column 'patient', named in groups, has 30 different values: g"
    """
    if groups is None or groups == group:  # the latter keeps its rows together
        return []
    look = look_at(columns[groups])
    person = is_identifier(groups, look) or _is_group(groups, look)
    if look.different <= MOST_GROUPS and not person:
        return []
    return [
        f"column {groups!r}, named in groups, has {look.different} different values: groups only "
        "reports metrics by value (by sex, by age band), and rows of one value may be both in "
        "training and in test data; to keep the rows of one person (or device) in one split, use "
        f"group={groups!r}"
    ]


def _is_group(name: str, look: Look) -> bool:
    several = look.different < look.count and look.different > look.count // 20
    return several and look.kind in ("texts", "whole") and bool(_words(name) & {*PEOPLE})


def _words(name: str) -> set[str]:
    """Return the words of a column's name.

    >>> sorted(_words("patientID_2")), sorted(_words("Hospital.name"))
    (['2', 'id', 'patient'], ['hospital', 'name'])
    """
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", name)
    return {word.lower() for word in re.split(r"[^A-Za-z0-9]+", apart) if word}

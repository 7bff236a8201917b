"""The classes of a target column, by adding what every client tells of its own rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equifed.data.columns import to_numbers
from equifed.data.preparation import Target
from equifed.data.prepared_columns import name_category, read_numbers
from equifed.data.split import DataError
from equifed.data.targets import MANY, ask_task, refuse_numbers_in_text


def describe_target(name: str, values: Sequence[Any], task: str | None = None) -> dict[str, Any]:
    """Return what one client tells of its targets: of which kind they are, and which labels.

    Labels are told unless the target is a regression: by ``task``, or because of its fractions.

    >>> describe_target("ill", ["no", "yes", "no"])
    {'numeric': False, 'whole': False, 'labels': ['no', 'yes']}
    """
    where = f"Column {name!r}"
    try:
        values = list({(type(v), v): v for v in values}.values())
    except TypeError:
        raise DataError(f"{where} must hold text or numbers, one in a row.") from None
    flags = [isinstance(v, bool | np.bool_) for v in values]
    numbers = None if any(flags) and task != "regression" else to_numbers(values)
    if task == "regression":
        if numbers is None:
            odd = next(v for v in values if to_numbers([v]) is None)
            raise DataError(
                f"{where} is not numeric (it has {str(odd)!r}): cannot be a regression."
            )
        read_numbers(name, values)  # refuses infinities
        return {"numeric": True, "whole": False, "labels": []}
    if numbers is not None:
        whole = bool(np.all(np.isfinite(numbers) & (numbers == np.round(numbers))))
        if not whole and task is None:
            read_numbers(name, values)
            return {"numeric": True, "whole": False, "labels": []}
        if whole:
            distinct = sorted({int(v) for v in numbers.tolist()})
            return {"numeric": True, "whole": True, "labels": [str(v) for v in distinct]}
    elif task is None:
        numeric = [
            to_numbers([v]) is not None and not f for v, f in zip(values, flags, strict=True)
        ]
        refuse_numbers_in_text(where, [str(v) for v in values], numeric)
    labels = sorted({name_category(v) for v in values})
    return {"numeric": numbers is not None, "whole": False, "labels": labels}


def combine_targets(
    name: str,
    answers: Mapping[str, Mapping[str, Any]],
    task: str | None = None,
    classes: int | None = None,
    unit: str | None = None,
) -> Target:
    """Return the target of all clients, from what :func:`describe_target` gave for each.

    >>> told = {"n": describe_target("y", [-1, 1]), "s": describe_target("y", ["1"])}
    >>> combine_targets("y", told)
    Target(name='y', classes=('-1', '1'), unit=None)
    """
    where = f"Column {name!r}"
    numeric = all(told["numeric"] for told in answers.values())
    if task is None and not numeric and any(told["numeric"] for told in answers.values()):
        one, two = (next(c for c, t in answers.items() if t["numeric"] is k) for k in (True, False))
        raise DataError(
            f"{where} holds numbers at client {one!r} and text at client {two!r}; make them alike, "
            "or say task='classification' if all of them are classes."
        )
    whole = all(told["whole"] for told in answers.values())
    if task == "regression" or (task is None and numeric and not whole):
        return Target(name, None, unit)
    labels = {label for told in answers.values() for label in told["labels"]}
    if classes is not None:
        if not whole:
            raise DataError(
                f"With classes={classes} the target column must hold labels 0..{classes - 1}, got "
                "text; leave classes out to have the labels numbered."
            )
        return Target(name, tuple(str(k) for k in range(classes)), unit)
    if not whole:
        return Target(name, tuple(sorted(labels)), unit)
    distinct = sorted(int(label) for label in labels)
    gaps = len(distinct) > 2 and distinct[-1] - distinct[0] >= len(distinct)
    if task is None and (len(distinct) > MANY or gaps):
        ask_task(where, distinct)
    return Target(name, tuple(map(str, distinct)), unit)

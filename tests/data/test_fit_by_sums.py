"""A fit by sums alone: the preparation of the table of all, to the bit."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equifed.data.federation import Federation
from equifed.data.fit import ask_kinds
from equifed.data.fit_by_sums import (
    find_names,
    fit_by_sums,
    from_vector,
    join_exactly,
    split_exactly,
    to_vector,
)
from equifed.data.preparation import Preparation, Prepare, Target
from equifed.data.site_table import SiteTable, find_stretched
from equifed.data.split import DataError, Holdout
from equifed.data.table import TableRequest

FLOATS = st.floats(allow_nan=False, allow_infinity=False)


@pytest.mark.long
@given(st.lists(FLOATS, min_size=1, max_size=8))
def test_sums_of_digits_are_those_of_fsum(values: list[float]) -> None:
    total = np.sum([split_exactly(v) for v in values], axis=0)
    try:
        expected = math.fsum(values)
    except OverflowError:
        return
    assert join_exactly(total.tolist()) == expected


def make_table(seed: int = 0, rows: int = 160) -> dict[str, list[Any]]:
    """Return rows of four sites with gaps, rare texts, an offset, and a column of one site only."""
    rng = np.random.default_rng(seed)
    site = rng.choice(["north", "south", "east", "west"], size=rows, p=[0.4, 0.3, 0.2, 0.1])
    arm = rng.choice(["a", "b", "other", "rare", "é"], size=rows, p=[0.4, 0.3, 0.15, 0.03, 0.12])
    age = 1e6 + rng.normal(size=rows) * 12
    return {
        "site": site.tolist(),
        "age": [None if rng.random() < 0.1 else float(v) for v in age],
        "arm": [None if rng.random() < 0.05 else str(v) for v in arm],
        "tiny": (rng.normal(size=rows) * 1e-9).tolist(),
        "ward": [f"ward {int(k)}" for k in rng.integers(60, size=rows)],
        "ill": rng.choice(["no", "yes"], size=rows).tolist(),
    }


def divide(table: dict[str, list[Any]]) -> dict[str, dict[str, list[Any]]]:
    """Return what each site has of a table, without the column that says whose it is."""
    sites = dict.fromkeys(table["site"])
    return {
        name: {
            c: [v for v, who in zip(values, table["site"], strict=True) if who == name]
            for c, values in table.items()
            if c != "site"
        }
        for name in sites
    }


def fit_sites(sites: dict[str, SiteTable], prepare: Prepare) -> Preparation:
    first = next(iter(sites.values()))
    asked = ask_kinds(
        first.features,
        Target("ill", ("no", "yes")),
        prepare,
        client="site",
        choosy=True,
        left_out=first.rest,
    )
    asked["salt"] = "run"

    def answer(site: SiteTable, asked: Any) -> Any:
        stage = "sums" if asked["stage"] in ("names", "counts") else asked["stage"]
        return site.answer({**asked, "stage": stage})

    def add(asked: Any) -> Any:
        return np.sum([to_vector(asked, answer(s, asked)) for s in sites.values()], axis=0)

    def collect(asked: Any) -> Any:
        return [find_names(asked, answer(s, asked)) for s in sites.values()]

    return fit_by_sums(asked, add, collect)


PREPARES = {
    "default": Prepare(),
    "few": Prepare(min_count=2),
    "all categories": Prepare(unknown="error"),
    "nothing": Prepare(scale=None, missing="mean"),
    "drop": Prepare(missing="drop"),
    "no frequent text": Prepare(min_count=90),
}


@pytest.mark.long
@pytest.mark.parametrize("name", PREPARES)
@pytest.mark.parametrize("seed", [0, 1])
def test_sites_fit_what_the_table_of_all_fits(name: str, seed: int) -> None:
    prepare, table = PREPARES[name], make_table(seed)
    if prepare.unknown == "error":  # held-out rows have wards that no training row has
        del table["ward"]
    request = TableRequest("site", "ill", prepare=prepare, holdout=Holdout(0.1, 0.2, seed))
    options: dict[str, Any] = {
        "scale": prepare.scale,
        "missing": prepare.missing,
        "unknown": prepare.unknown,
        "min_count": prepare.min_count,
    }
    with warnings.catch_warnings():  # columns of which no text is frequent are left out, and told
        warnings.simplefilter("ignore")
        pooled = Federation.from_table(
            table, "site", "ill", validation=0.1, test=0.2, seed=seed, dtype="float64", **options
        )
    sites = {who: SiteTable.read(own, who, request) for who, own in divide(table).items()}
    fitted = fit_sites(sites, prepare)
    assert fitted.to_json() == pooled.preparation.to_json()  # type: ignore[union-attr]
    for k, (who, site) in enumerate(sites.items()):
        alone = site.prepare(fitted, "float64")
        assert alone.names == (who,)
        for label, split in pooled.splits().items():
            for mine, theirs in zip(alone.splits()[label].client(0), split.client(k), strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_a_rare_text_is_not_named() -> None:
    """No more names than those with enough rows, in the whole federation, leave the sites."""
    table = make_table(0)
    request = TableRequest("site", "ill")
    sites = {who: SiteTable.read(own, who, request) for who, own in divide(table).items()}
    asked = ask_kinds(["arm"], Target("ill"), Prepare())
    asked |= {"stage": "sums", "coded": ["arm"], "salt": "s"}
    answers = [site.answer(asked) for site in sites.values()]
    buckets = from_vector(asked, np.sum([to_vector(asked, a) for a in answers], axis=0))
    counts = {t: table["arm"].count(t) for t in set(table["arm"]) if t is not None}
    least = sorted(counts.values())[1]
    heavy = [b for b, n in enumerate(buckets["arm"]["buckets"]) if n >= least]
    named = {t for a in answers for t in find_names({**asked, "heavy": {"arm": heavy}}, a)["arm"]}
    assert named == {text for text, count in counts.items() if count >= least}
    assert named != set(counts)


def test_what_a_site_gives_is_checked() -> None:
    table = divide(make_table())["north"]
    request = TableRequest("site", "ill")
    with pytest.raises(DataError, match=r"Client 'north': the table has no column 'AGE', which"):
        SiteTable.read(table, "north", request, {"age": "AGE"})
    with pytest.raises(DataError, match=r"has a column 'age', and the mapping says that 'tiny'"):
        SiteTable.read(table, "north", request, {"age": "tiny"})
    renamed = {("Alter" if c == "age" else c): v for c, v in table.items()}
    site = SiteTable.read(renamed, "north", request, {"age": "Alter"})
    assert site.features == ("age", "arm", "tiny", "ward")
    others = {**table, "site": ["south"] * len(table["age"])}
    with pytest.raises(DataError, match="says 'south', but this site is 'north'"):
        SiteTable.read(others, "north", request)
    asked = ask_kinds(["ill"], Target("ill"), Prepare())
    with pytest.raises(DataError, match="'ill' is not a feature that was agreed"):
        site.answer(asked)
    assert site.describe_kinds()[:2] == [["age", "numbers"], ["arm", "texts"]]
    assert site.describe_target() == {"numeric": False, "whole": False, "labels": ["no", "yes"]}


@pytest.mark.parametrize(("different", "told"), [(20, 20), (21, 21), (30, 21)])
def test_of_whole_numbers_that_may_be_values_a_site_tells_few(different: int, told: int) -> None:
    """One more than may be classes: enough to ask which they are, and no more of the values."""
    rows = {"site": ["north"] * 60, "x": [0.5] * 60, "count": [k % different for k in range(60)]}
    for task, wanted in ((None, told), ("classification", different)):
        request = TableRequest("site", "count", task=task)
        labels = SiteTable.read(rows, "north", request).describe_target()["labels"]
        assert len(labels) == wanted


@pytest.mark.parametrize("scale", ["standard", None])
@pytest.mark.parametrize("target_scale", ["standard", None])
def test_a_preparation_that_stretches_a_column_or_the_target_is_told_by_its_name(
    scale: Any, target_scale: Any
) -> None:
    """Fitted to such rows it names nothing; with one number of it changed, that column."""
    draw = np.random.default_rng(0)
    rows = {"site": ["a", "b"] * 30, "age": 50 + 10 * draw.normal(size=60)}
    rows["cost"] = 2000 + 300 * draw.normal(size=60)
    given = {"scale": scale, "target_scale": target_scale}
    honest = Federation.from_table(rows, "site", "cost", task="regression", **given).preparation
    assert honest is not None
    (age,), target = honest.columns, honest.target
    stretched = {
        "": honest,
        "age": replace(honest, columns=(replace(age, scale=age.scale / 1e3),)),
        "cost": replace(honest, target=replace(target, scale=target.scale / 1e3)),
    }
    values = np.array(rows["age"])
    for name, fitted in stretched.items():
        inputs = np.array(fitted.columns[0].encode(values.tolist(), ["a"] * 60)).reshape(60, 1)
        targets = (np.array(rows["cost"]) - fitted.target.centre) / fitted.target.scale
        made = Federation.from_clients({"a": (inputs, targets)})
        assert find_stretched(made, fitted, Prepare(**given)) == name

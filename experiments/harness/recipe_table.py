"""One method against all others on many data sets: tables, checks and the figure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from equifed.metrics import Interval
from experiments.harness.drawing import intervals
from experiments.harness.experiment import Cell, Check, Outcome, Settings, Table
from experiments.harness.measures import with_interval, with_limits
from experiments.harness.recipe import (
    ALONE,
    BASE,
    FEW,
    NEWTON,
    OURS,
    OWN,
    OWN_SOLVED,
    SOLVED,
    Found,
    Network,
    best_published,
    column,
    difference,
    is_ahead,
    network_verdicts,
    networks_table,
    read_networks,
    spread,
    without_fairness,
)

SOURCE = "our aim"
PIECES = (
    ("the fair objective, with own parts", OURS, OWN_SOLVED),
    ("the fair objective, one model", NEWTON, SOLVED),
    ("own parts, solved for the average", OWN_SOLVED, SOLVED),
    ("being solved, with own parts", OWN_SOLVED, OWN),
    ("being solved, one model", SOLVED, BASE),
)
"""What ours is made of: a piece, and the methods with and without it."""


def compare(
    found: Found, tuned: Mapping[str, Any], settings: Settings, missing: Sequence[str] = ()
) -> Outcome:
    """Return checks, tables and the figure; ``missing`` is what has not been run."""
    networks = read_networks(settings["networks"])
    tables = {
        "verdicts": verdicts_table(found, settings),
        "verdicts-networks": network_verdicts(networks),
        "pieces": pieces_table(found, settings),
        "methods": methods_table(found, len(settings["places"])),
        "against": against_table(found),
        "sets": sets_table(found),
        "choice": choice_table(found),
        "scale": scale_table(tuned),
        "networks": networks_table(settings["networks"]["experiments"]),
    }
    problems = [
        f"{name}, {method}, seed {seed}: every try failed"
        for name, methods in found.items()
        for method, runs in methods.items()
        for seed, one in runs.items()
        if one is None
    ]
    drawings = {"ours-minus-best": draw(found, settings)}
    return Outcome(checks(found, settings, networks), tables, drawings, [*missing, *problems])


# -- tables -----------------------------------------------------------------------------------


def _has_own(settings: Settings, name: str) -> bool:
    return bool(settings["data"][name].get("own", True))


def verdicts_table(found: Found, settings: Settings) -> Table:
    """Return one line per data set."""
    rows: list[list[Cell]] = []
    for name, methods in found.items():
        best = best_published(methods)
        told, wider = difference(methods, best, "worst")
        plain = without_fairness(methods, _has_own(settings, name))
        own, fair, alone = (
            with_limits(difference(methods, m, "worst")[0]) if m in methods else None
            for m in (OWN, plain, ALONE)
        )
        rows.append([
            name, "yes" if spread(methods[BASE]).lower > 0 else "no", best, with_limits(told),
            f"{wider.lower:+.1f} to {wider.upper:+.1f}",
            "yes" if told.estimate > 0 else "no",
            "yes" if is_ahead(methods) else "no", "yes" if is_ahead(methods, new=True) else "no",
            own, fair,
            with_limits(difference(methods, best_published(methods, "average"), "average")[0]),
            alone,
        ])  # fmt: skip
    titles = ("data set", "spread beyond chance", "best published for the worst",
              "ours minus it, worst", "the same, for new samples", "ours first",
              "beyond 95 % of every published method", "the same, for new samples ",
              f"ours minus {OWN}, worst", "ours minus the same solved for the average, worst",
              "ours minus the best published average, average",
              "ours minus alone, worst")  # fmt: skip
    return Table("Verdicts: points of test accuracy within seeds (95 %)", titles, rows)


def pieces_table(found: Found, settings: Settings) -> Table:
    """Return what each piece of ours makes, all else being the same."""
    rows: list[list[Cell]] = []
    for name, methods in found.items():
        for piece, one, other in PIECES:
            if one == NEWTON and not _has_own(settings, name):
                one = OURS  # that is what it is there
            if {one, other} <= methods.keys():
                told = [difference(methods, other, k, one) for k in ("worst", "average")]
                rows.append([name, piece, f"{one} minus {other}",
                             *(with_limits(plain) for plain, _ in told),
                             f"{told[0][1].lower:+.1f} to {told[0][1].upper:+.1f}"])  # fmt: skip
    titles = ("data set", "piece", "difference", "worst", "average", "worst, for new samples")
    return Table("What the pieces of ours make within seeds, points (95 %)", titles, rows)


def methods_table(found: Found, tries: int) -> Table:
    """Return every method's measures on every set."""
    rows: list[list[Cell]] = []
    for name, methods in found.items():
        for method, runs in methods.items():
            known = [one for one in runs.values() if one is not None]
            if not known:
                rows.append([name, method, 0, None, None, None, None, None, len(runs) * tries])
                continue
            gaps = [one.gap for one in known if one.gap is not None]
            rows.append([
                name, method, len(known), with_interval(column(runs, "average")),
                with_interval(column(runs, "worst")), round(float(column(runs, "floor").mean()), 1),
                round(math.sqrt(max(0.0, spread(runs).estimate)), 1),
                max(gaps) if gaps else None,
                sum(one.failed for one in known) + tries * (len(runs) - len(known)),
            ])  # fmt: skip
    titles = ("data set", "method", "seeds", "average, %", "worst, %", "its chance floor, %",
              "spread beyond chance", "largest certified gap", "tries that failed")  # fmt: skip
    return Table("Test accuracy, mean over seeds ± 95 %", titles, rows)


def against_table(found: Found) -> Table:
    """Return ours minus every other method."""
    rows: list[list[Cell]] = []
    for name, methods in found.items():
        for method in (m for m in methods if m != OURS and len(column(methods[m], "worst"))):
            told = [difference(methods, method, k) for k in ("worst", "average")]
            rows.append([name, method, *(with_limits(one) for one, _ in told),
                         f"{told[0][1].lower:+.1f} to {told[0][1].upper:+.1f}"])  # fmt: skip
    titles = ("data set", "method", "worst", "average", "worst, for new samples")
    return Table("Ours minus the method within seeds, points (95 %)", titles, rows)


def sets_table(found: Found) -> Table:
    """Return what the data sets are like under FedAvg."""
    rows: list[list[Cell]] = []
    for name, methods in found.items():
        first = next(one for one in methods[BASE].values() if one is not None)
        told = spread(methods[BASE])
        rows.append([name, len(first.sizes), f"{first.sizes.min():g} to {first.sizes.max():g}",
                     "worst 20 %" if len(first.sizes) >= FEW else "worst client",
                     with_interval(told), "yes" if told.lower > 0 else "no"])  # fmt: skip
    titles = ("data set", "clients", "test samples of a client (first split)", "worst",
              f"variance of {BASE} beyond chance", "beyond chance")  # fmt: skip
    return Table("Data sets; the variance in squared points, mean over seeds ± 95 %", titles, rows)


def choice_table(found: Found) -> Table:
    """Return how often validation samples chose each try."""
    rows: list[list[Cell]] = []
    for name, methods in found.items():
        for method, runs in methods.items():
            known = [one for one in runs.values() if one is not None]
            counts = Counter(one.settings for one in known)
            tried = known[0].tried if known else ()  # all of them failed
            rows += [[f"{name}: {method}", words, counts[words]] for words in tried]
    return Table("What validation samples chose", ("method", "settings", "trials that chose it"),
                 rows)  # fmt: skip


def scale_table(tuned: Mapping[str, Any]) -> Table:
    """Return FedAvg's validation scores by step size and penalty, and which were taken."""
    rows: list[list[Cell]] = []
    for name, (scores, best) in tuned.items():
        for (lr, l2), value in scores.items():
            taken = "taken" if (lr, l2) == (best["lr"], best["l2"]) else ""
            known = round(value, 4) if math.isfinite(value) else None
            rows.append([name, lr, l2, known, taken])
    titles = ("data set", "lr", "l2", "validation score", "")
    return Table(f"{BASE} on splits that are not reported: step size and penalty", titles, rows)


def draw(found: Found, settings: Settings) -> str:
    """Draw ours minus the best published method, minus FedAvg with an own part, and others."""
    others: dict[str, list[str | None]] = {
        "best published": [best_published(methods) for methods in found.values()],
        OWN: [OWN] * len(found),
        "solved, not fair": [
            without_fairness(methods, _has_own(settings, name)) for name, methods in found.items()
        ],
        ALONE: [ALONE] * len(found),
    }
    told = {
        title: {
            name: difference(methods, other, "worst")[0]
            for (name, methods), other in zip(found.items(), names, strict=True)
            if other in methods and other is not None
        }
        for title, names in others.items()
    }
    return intervals({title: one for title, one in told.items() if one},
                     title="Ours minus another method, worst-served", x_label="points")  # fmt: skip


# -- checks -----------------------------------------------------------------------------------


def checks(found: Found, settings: Settings, networks: Sequence[Network]) -> list[Check]:
    """Hold what was aimed at against what came out: first what the own part alone explains."""
    known = [one for one in networks if one.published]
    told = {n: difference(m, OWN, "worst")[0] for n, m in found.items() if OWN in m}
    told |= {one.name: one.own for one in known if one.own is not None}
    out = [_nowhere_worse(f"{OWN} (networks: and server momentum and a mean of models)", told)]
    plain = {n: without_fairness(m, _has_own(settings, n)) for n, m in found.items()}
    fair = {n: difference(found[n], m, "worst")[0] for n, m in plain.items() if m is not None}
    out.append(_nowhere_worse("the same solved for the average (what the fair objective makes)",
                              fair))  # fmt: skip
    return [*(one for one in out if one.measured), *_checks_of_leads(found, settings, networks)]


def _nowhere_worse(other: str, told: Mapping[str, Interval]) -> Check:
    return Check(
        f"ours nowhere serves the worst worse than {other}, beyond 95 %", SOURCE,
        "; ".join(f"{n} {with_limits(t)}" for n, t in told.items()),
        all(t.upper >= 0 for t in told.values()),
    )  # fmt: skip


def _checks_of_leads(found: Found, settings: Settings, networks: Sequence[Network]) -> list[Check]:
    """Judge the leads over published methods where clients are served unequally beyond chance."""
    linear = [n for n, m in found.items() if spread(m[BASE]).lower > 0]
    spread_out = [one for one in networks if one.is_spread and one.published]
    leads = {n: (best_published(found[n]), difference(found[n], best_published(found[n]), "worst"))
             for n in linear}  # fmt: skip
    told = {n: (best, both[0]) for n, (best, both) in leads.items()}
    told |= {one.name: (one.best(), one.lead()) for one in spread_out}
    first = Check(
        "ours serves the worst best of all published methods on every set with a spread beyond "
        "chance", SOURCE,
        "; ".join(f"{n} {with_limits(t)} against {best}" for n, (best, t) in told.items()),
        bool(told) and all(t.estimate > 0 for _, t in told.values()),
        "the best rival is chosen on test samples, which flatters it",
    )  # fmt: skip
    counted = [one for one in spread_out if not one.absent]
    left = "; ".join(f"{one.name} is not counted ({'; '.join(one.absent)})"
                     for one in networks if one.absent)  # fmt: skip
    ahead = [n for n in linear if is_ahead(found[n])]
    ahead += [one.name for one in counted if one.is_ahead]
    new, wanted = [n for n in linear if is_ahead(found[n], new=True)], settings["wanted"]
    return [first, Check(
        f"beyond 95 % of every published method on at least {wanted} sets, linear models and "
        "networks together, each by its own protocol", SOURCE,
        f"{len(ahead)} of {len(linear) + len(counted)}: {', '.join(ahead) or 'none'}",
        len(ahead) >= wanted, left,
    ), Check(
        f"the same for new samples (shared samples counted; linear models alone), {wanted} sets",
        SOURCE, f"{len(new)} of {len(linear)}: {', '.join(new) or 'none'}", len(new) >= wanted,
    )]  # fmt: skip

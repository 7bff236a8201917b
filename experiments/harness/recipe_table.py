"""One method against all others on many data sets: tables, checks and the figure."""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.harness.drawing import Line, figure
from experiments.harness.experiment import ROOT, Cell, Check, Outcome, Settings, Table
from experiments.harness.measures import with_interval, with_limits
from experiments.harness.recipe_trials import (
    ALONE,
    BASE,
    FEW,
    OURS,
    OWN,
    Found,
    best_published,
    column,
    difference,
    is_ahead,
    spread,
)

SOURCE = "our aim"


def compare(
    found: Found, tuned: Mapping[str, Any], settings: Settings, missing: Sequence[str] = ()
) -> Outcome:
    """Return checks, tables and the figure; ``missing`` is what has not been run."""
    tables = {
        "verdicts": verdicts_table(found),
        "methods": methods_table(found),
        "against": against_table(found),
        "sets": sets_table(found),
        "choice": choice_table(found, settings),
        "scale": scale_table(tuned),
        "networks": networks_table(settings["networks"]),
    }
    problems = [
        f"{name}, {method}, seed {seed}: every try failed"
        for name, methods in found.items()
        for method, runs in methods.items()
        for seed, one in runs.items()
        if one is None
    ]
    return Outcome(
        checks(found, settings), tables, {"ours-minus-best": draw(found)}, [*missing, *problems]
    )


# -- tables -----------------------------------------------------------------------------------


def verdicts_table(found: Found) -> Table:
    """Return one line per data set."""
    rows: list[list[Cell]] = []
    for name, methods in found.items():
        best = best_published(methods)
        told, wider = difference(methods, best, "worst")
        own = with_limits(difference(methods, OWN, "worst")[0]) if OWN in methods else None
        alone = with_limits(difference(methods, ALONE, "worst")[0]) if ALONE in methods else None
        rows.append([
            name, "yes" if spread(methods[BASE]).lower > 0 else "no", best, with_limits(told),
            f"{wider.lower:+.1f} to {wider.upper:+.1f}",
            "yes" if told.estimate > 0 else "no",
            "yes" if is_ahead(methods) else "no", "yes" if is_ahead(methods, new=True) else "no",
            own, with_limits(difference(methods, best_published(methods, "average"), "average")[0]),
            alone,
        ])  # fmt: skip
    titles = ("data set", "spread beyond chance", "best published for the worst",
              "ours minus it, worst", "the same, for new samples", "ours first",
              "beyond 95 % of every published method", "the same, for new samples ",
              f"ours minus {OWN}, worst", "ours minus the best published average, average",
              "ours minus alone, worst")  # fmt: skip
    return Table("Verdicts: points of test accuracy within seeds (95 %)", titles, rows)


def methods_table(found: Found) -> Table:
    """Return every method's measures on every set."""
    rows: list[list[Cell]] = []
    for name, methods in found.items():
        for method, runs in methods.items():
            known = [one for one in runs.values() if one is not None]
            if not known:
                rows.append([name, method, 0, None, None, None, None, None, len(runs) * 3])
                continue
            gaps = [one.gap for one in known if one.gap is not None]
            rows.append([
                name, method, len(known), with_interval(column(runs, "average")),
                with_interval(column(runs, "worst")), round(float(column(runs, "floor").mean()), 1),
                round(math.sqrt(max(0.0, spread(runs).estimate)), 1),
                max(gaps) if gaps else None, sum(one.failed for one in known),
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


def choice_table(found: Found, settings: Settings) -> Table:
    """Return how often each try was chosen, and whether that is mostly an end of what was tried."""
    last, rows = len(settings["places"]) - 1, []
    for name, methods in found.items():
        for method, runs in methods.items():
            known = [one for one in runs.values() if one is not None]
            counts = Counter((one.place, one.settings) for one in known)
            told = "; ".join(f"{words}: {n}" for (_, words), n in sorted(counts.items()))
            ends = sum(n for (place, _), n in counts.items() if place in (0, last))
            rows.append([name, method, told, ends, len(known)])
    return Table("What validation samples chose (times)",
                 ("data set", "method", "settings", "at an end", "seeds"), rows)  # fmt: skip


def scale_table(tuned: Mapping[str, Any]) -> Table:
    """Return FedAvg's validation scores by step size and penalty, and which were taken."""
    rows: list[list[Cell]] = []
    for name, (scores, best) in tuned.items():
        for (lr, l2), value in scores.items():
            taken = "taken" if lr in best["lr"] and l2 == best["l2"] else ""
            known = round(value, 4) if math.isfinite(value) else None
            rows.append([name, lr, l2, known, taken])
    titles = ("data set", "lr", "l2", "validation score", "")
    return Table(f"{BASE} on splits that are not reported: step size and penalty", titles, rows)


def networks_table(names: Sequence[str]) -> Table:
    """Return the rows that the experiments with networks have stored, to be read beside."""
    rows: list[list[Cell]] = []
    for name in names:
        for table in ("methods", "accuracy"):
            path = ROOT / name / "results" / f"{table}.csv"
            if path.exists():
                with path.open(encoding="utf-8", newline="") as file:
                    for line in csv.DictReader(file):
                        told = {k.removesuffix(", %"): v for k, v in line.items()}
                        rows.append([name, told["method"], told["average"], told["worst 20 %"]])
    titles = ("experiment", "method", "average, %", "worst 20 %, %")
    return Table("Networks: as stored by their own experiments, with their own tries and seeds",
                 titles, rows)  # fmt: skip


def draw(found: Found) -> str:
    """Draw ours minus the best published method, minus FedAvg with an own part, and minus alone."""
    lines = {}
    for title, other in (("best published", None), (OWN, OWN), (ALONE, ALONE)):
        places = [k for k, m in enumerate(found.values()) if other is None or other in m]
        sets = [list(found.values())[k] for k in places]
        told = [difference(m, other or best_published(m), "worst")[0] for m in sets]
        ends = [t.lower for t in told], [t.upper for t in told]
        if places:
            lines[title] = Line(places, [t.estimate for t in told], *ends, dots=True)
    shown = ", ".join(f"{k} {name}" for k, name in enumerate(found))
    return figure(lines, title="Ours minus another method, worst-served", x_label=shown,
                  y_label="points")  # fmt: skip


# -- checks -----------------------------------------------------------------------------------


def checks(found: Found, settings: Settings) -> list[Check]:
    """Hold what was aimed at against what came out: first what the own part alone explains."""
    out = []
    told = {n: difference(m, OWN, "worst")[0] for n, m in found.items() if OWN in m}
    if told:
        out.append(Check(
            f"ours nowhere serves the worst worse than {OWN}, beyond 95 %", SOURCE,
            "; ".join(f"{n} {with_limits(t)}" for n, t in told.items()),
            all(t.upper >= 0 for t in told.values()),
        ))  # fmt: skip
    spread_out = [n for n, m in found.items() if spread(m[BASE]).lower > 0]
    leads = {n: difference(found[n], best_published(found[n]), "worst")[0] for n in spread_out}
    out.append(Check(
        "ours serves the worst best of all published methods on every set with a spread beyond "
        "chance", SOURCE,
        "; ".join(f"{n} {with_limits(t)} against {best_published(found[n])}"
                  for n, t in leads.items()),
        bool(leads) and all(t.estimate > 0 for t in leads.values()),
        "the best rival is chosen on test samples, which flatters it",
    ))  # fmt: skip
    for new, words in ((False, "over seeds"), (True, "for new samples (shared samples counted)")):
        ahead = [n for n in spread_out if is_ahead(found[n], new)]
        out.append(Check(
            f"beyond 95 % {words} of every published method on at least {settings['wanted']} sets",
            SOURCE, f"{len(ahead)} of {len(spread_out)}: {', '.join(ahead) or 'none'}",
            len(ahead) >= settings["wanted"],
        ))  # fmt: skip
    return out

"""RC-FL on roles of Shakespeare: an LSTM, and ten clients a round.

The tweets of RC-FL's Table 1 are not to be had: the same path runs on roles of Shakespeare, and the
claims about it are compared only in kind.
"""

from __future__ import annotations

from experiments.harness.choice import choose
from experiments.harness.experiment import Check, Context, Outcome
from experiments.harness.measures import accuracy_table, validation_score
from experiments.harness.natural import MEASURES, TAIL, by_seed, draw_clients, listed, rc_checks
from experiments.harness.running import Histories, run_variants


def run(context: Context) -> Outcome:
    """Choose every method's settings on validation samples, then compare test accuracies."""
    variants, searched = choose(context, lambda history: validation_score(history, TAIL))
    found, problems = run_variants(context, variants, context.settings["seeds"])
    tables = {"accuracy": accuracy_table(found, MEASURES, fraction=0.1), "grid": searched}
    source = "RC-FL, Table 1, Sent140 (tweets there, roles of Shakespeare here)"
    out = [*rc_checks(found, source), _better_average(found, source)]
    return Outcome(out, tables, {"clients": draw_clients(found)}, problems)


def _better_average(found: Histories, source: str) -> Check:
    average, shown = by_seed(found, "average")
    return Check(
        "with an LSTM and partial participation RC-FL also has the best average accuracy",
        source,
        f"accuracy in %: {listed(shown)}",
        all(average["RC-FL"] > one for method, one in average.items() if method != "RC-FL"),
    )

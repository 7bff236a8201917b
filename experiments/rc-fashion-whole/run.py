"""RC-FL on all 7,000 images of three classes: rc-fashion on more data, with a plan."""

from __future__ import annotations

from experiments.harness.experiment import EXPERIMENTS, Context, Outcome


def run(context: Context) -> Outcome:
    """Choose every method's settings on validation samples, then compare test accuracies."""
    outcome: Outcome = EXPERIMENTS["rc-fashion"].module.run(context)
    return outcome

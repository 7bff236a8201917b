"""What the words of a report mean; those that a page does not use are left out."""

from __future__ import annotations

from collections.abc import Sequence

from equifed.report.methods import Method
from equifed.report.more import find_details, list_further
from equifed.report.own_parts import find_note
from equifed.report.scales import Scale

GLOSSARY = {
    "Accuracy": "fraction of a client's samples that are answered correctly.",
    "Alone": "what the client would have with a model of its own, trained on its samples only.",
    "AUROC": "how often a positive sample is ranked before a negative one; 0.5 is guessing.",
    "Average over clients": "every client counts once, however many samples it has.",
    "Calibration error": "mean distance between the probability that the model gives its answer "
    "and how often such answers are right.",
    "Chance floor": "what the worst-served fifth of equally served clients would have on average, "
    "only because their samples are few; in the tables, by chance alone.",
    "Interval": "95 of 100 such intervals contain the true value, the others miss it.",
    "Loss": "what training minimises, per sample; lower is better.",
    "Majority class": "accuracy of always answering the client's most frequent class. A model that "
    "is below it serves the client worse than no model.",
    "MSE": "mean squared error of predicted values, in squared units of the target.",
    "Own part": "numbers of the model that every client keeps for itself, beside the shared ones.",
    "Underserved": "served worse than the other clients by more than chance explains.",
    "Weight": "how much a client's loss counts in a round; equal weights are 1 over the number of "
    "clients.",
    "Without own part": "with the shared model and the mean of all own parts, which is what a new "
    "client gets.",
    "Worst-served 20 %": "mean over the fifth of the clients, rounded up, with the worst values.",
}


def list_glossary(methods: Sequence[Method], scale: Scale | None) -> list[tuple[str, str]]:
    """Return the words that a page uses, with their meanings."""
    if scale is None:
        return []
    histories = [method.runs[0].history for method in methods]
    details = [find_details(history, scale) for history in histories]
    classes = scale.metric == "accuracy"
    used = {
        "Accuracy": classes,
        "Chance floor": classes,
        "Majority class": classes and any(found is not None for found in details),
        "MSE": scale.metric == "mse",
        "Alone": any(history.alone is not None for history in histories),
        "Own part": any(find_note(history) for history in histories),
        "Without own part": any(history.without_own is not None for history in histories),
        "AUROC": any("auroc" in list_further(history, scale) for history in histories),
        "Calibration error": any(f is not None and f.pool_calibration() for f in details),
    }
    return [(word, text) for word, text in GLOSSARY.items() if used.get(word, True)]

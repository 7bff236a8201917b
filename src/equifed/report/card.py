"""The model card: what a model predicts, for whom, how well, and what nobody has shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equifed.metrics import find_metric
from equifed.report.document import find_note, read_own
from equifed.report.methods import capital
from equifed.training.history import History


def write_card(
    history: History,
    config: Mapping[str, Any],
    told: Mapping[str, Any],
    predictor: Mapping[str, Any],
    preparation: str | None,
    left_out: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the model card of a run in Markdown.

    Parameters
    ----------
    history : History
        The complete run.
    config : mapping
        Its resolved configuration.
    told : mapping
        Its ``run.json``: versions, data, checksums.
    predictor : mapping
        The description of its predictor: classes, features, thresholds.
    preparation : str, optional
        What was done to the columns of a table.
    left_out : sequence of (column, reason)
        Columns that no feature comes from.
    """
    parts = [
        ["# Model card", "", _describe_task(config, told, predictor)],
        ["## Data", "", *_describe_data(told, predictor, preparation, left_out)],
        ["## Training", "", *_describe_training(history, config, told)],
        ["## Clients", "", *_tabulate(history)],
        ["## Limits", "", *_list_limits(history, predictor)],
    ]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def _describe_task(
    config: Mapping[str, Any], told: Mapping[str, Any], predictor: Mapping[str, Any]
) -> str:
    names = predictor["classes"]
    what = "a value" if names is None else f"one of the classes {_list(names)}"
    model, count = config["model"], len(predictor["clients"])
    return (
        f"Predicts {what} from {_plural(int(np.prod(predictor['input_shape'])), 'feature')} with "
        f"the model `{model['name']}` (loss `{model['loss']}`, l2 {model['l2']:g}), trained on the "
        f"data of {_plural(count, 'client')} ({told['data']['name']})."
    )


def _describe_data(
    told: Mapping[str, Any],
    predictor: Mapping[str, Any],
    preparation: str | None,
    left_out: Sequence[tuple[str, str]],
) -> list[str]:
    lines = [f"- Name: {told['data']['name']}; SHA-256 `{told['data']['sha256']}`."]
    known = () if preparation is None else ("preparation",)  # it is told below
    source = {k: v for k, v in told["data"]["source"].items() if v and k not in known}
    lines += [f"- {key.capitalize()}: {value}" for key, value in source.items()]
    if preparation is None:
        return [*lines, "- No preparation is part of the model: samples come as the data had them."]
    lines.append(f"- Preparation, part of the model: {preparation}.")
    lines += [f"- Column `{name}` was left out: {why}." for name, why in left_out]
    return [*lines, f"- Features: {_list(predictor['feature_names'], 40)}."]


def _describe_training(
    history: History, config: Mapping[str, Any], told: Mapping[str, Any]
) -> list[str]:
    algorithm = dict(config["algorithm"])
    objective = algorithm.pop("objective", None)
    chosen = "the average of the clients" if objective is None else _settings(objective)
    summary = history.summary()
    proof = history.describe_certificate() or "no certificate was computed"
    versions = ", ".join(f"{name} {v}" for name, v in told["versions"].items())
    given, own, note = history.given_out, read_own(history), find_note(history)
    which = "" if given is None else f"; gave out the model of round {given.round} ({given.kind})"
    return [
        f"- Objective: {chosen}.",
        f"- Algorithm: {_settings({'name': algorithm.pop('name'), **algorithm})}.",
        f"- {_plural(summary['rounds'], 'round')} from seed {config['seed']}{which}.",
        f"- Certificate: {proof}.",
        *([f"- {capital(note)}."] if note else []),
        *(
            [
                f"- {capital(own.describe)}; mean ± standard deviation over clients: "
                f"{own.list_spread()}."
            ]
            if own is not None
            else []
        ),
        f"- Versions: {versions}.",
    ]


def _tabulate(history: History) -> list[str]:
    """Return one line per client: its weight and every metric on every split."""
    shown = list(dict.fromkeys((r.split, r.metric) for r in history.metrics))
    records = [history.last(metric, split) for split, metric in shown]
    weights = history.weights[max(history.weights)] if history.weights else None
    head = ["client", *(f"{split} {metric}" for split, metric in shown)]
    for told, name in ((history.without_own, "without own part"), (history.alone, "alone")):
        if told is not None:
            records.append(told)
            head.append(f"{told.split} {told.metric} {name}")
    head += ["weight"] if weights is not None else []
    lines = [_line(head), _line(["---"] + ["---:"] * (len(head) - 1))]
    for i, name in enumerate(history.names):
        cells = [
            "" if r is None or np.isnan(r.values[i]) else f"{r.values[i]:.4g} (n={r.sizes[i]})"
            for r in records
        ]
        cells += [f"{weights[i]:.4g}"] if weights is not None else []
        lines.append(_line([name.replace("|", "\\|"), *cells]))
    return lines


def _list_limits(history: History, predictor: Mapping[str, Any]) -> list[str]:
    lines = []
    chosen = history.main_metric()
    if chosen is not None:
        metric, split = chosen
        clients = history.per_client(metric, split)
        if clients:
            worst = min(clients, key=lambda name: find_metric(metric).sign * clients[name])
            best = max(clients, key=lambda name: find_metric(metric).sign * clients[name])
            lines.append(
                f"- Served worst by {split} {metric}: {worst} ({clients[worst]:.4g}); best: {best} "
                f"({clients[best]:.4g})."
            )
        unmeasured = [name for name in history.names if name not in clients]
        if unmeasured:
            lines.append(f"- Without {split} samples, so not measured: {_list(unmeasured)}.")
        if split == "train":
            lines.append("- Measured on training samples alone: expect worse on new ones.")
    lines += [f"- {sentence}" for sentence in history.summary()["warnings"]]
    if predictor["thresholds"]:
        pairs = [f"{name} {value:g}" for name, value in predictor["thresholds"].items()]
        lines.append(f"- Thresholds of clients: {_list(pairs)}.")
    lines.append(
        "- Nothing is known about clients that took no part, about rows unlike those of training, "
        "and about groups inside clients. `equifed evaluate` measures new labelled rows."
    )
    return lines


def _settings(table: Any) -> str:
    """Return a table of settings in one line."""
    if not isinstance(table, Mapping):
        return f"`{table}`"
    rest = ", ".join(f"{key} = {value}" for key, value in table.items() if key != "name")
    return f"`{table.get('name', '')}`" + (f" ({rest})" if rest else "")


def _list(names: Sequence[Any], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"

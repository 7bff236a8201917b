"""The model card: what a model predicts, for whom, how well, and what nobody has shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from equifed.metrics import find_metric
from equifed.report.document import describe_own_part, find_note
from equifed.report.methods import capital, join_names, plural
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
        The description of its predictor: classes, features.
    preparation : str, optional
        What was done to the columns of a table.
    left_out : sequence of (column, reason)
        Columns that no feature comes from.
    """
    data, model, names = told["data"], config["model"], predictor["classes"]
    what = "a value" if names is None else f"one of the classes {join_names(names, 12)}"
    task = (
        f"Predicts {what} from {plural(int(np.prod(predictor['input_shape'])), 'feature')} with "
        f"the model `{model['name']}` (loss `{model['loss']}`, l2 {model['l2']:g}), trained on the "
        f"data of {plural(len(predictor['clients']), 'client')} ({data['name']})."
    )
    parts = {
        "# Model card": [task],
        "## Data": _describe_data(data, predictor, preparation, left_out),
        "## Training": _describe_training(history, config, told["versions"]),
        "## Clients": _tabulate(history),
        "## Limits": _list_limits(history, predictor),
    }
    return "\n\n".join("\n".join([head, "", *lines]) for head, lines in parts.items()) + "\n"


def _describe_data(
    data: Mapping[str, Any],
    predictor: Mapping[str, Any],
    preparation: str | None,
    left_out: Sequence[tuple[str, str]],
) -> list[str]:
    known = () if preparation is None else ("preparation",)  # it is told below
    source = {k: v for k, v in data["source"].items() if v and k not in known}
    lines = [f"- Name: {data['name']}; SHA-256 `{data['sha256']}`."]
    lines += [f"- {key.capitalize()}: {value}" for key, value in source.items()]
    if preparation is None:
        return [*lines, "- No preparation is part of the model: samples come as the data had them."]
    lines.append(f"- Preparation, part of the model: {preparation}.")
    lines += [f"- Column `{name}` was left out: {why}." for name, why in left_out]
    return [*lines, f"- Features: {join_names(predictor['feature_names'], 40)}."]


def _describe_training(
    history: History, config: Mapping[str, Any], versions: Mapping[str, Any]
) -> list[str]:
    algorithm = dict(config["algorithm"])
    objective = algorithm.pop("objective", None)
    chosen = "the average of the clients" if objective is None else _settings(objective)
    given = history.given_out
    which = "" if given is None else f"; final model: round {given.round} ({given.kind})"
    lines = [
        f"Objective: {chosen}",
        f"Algorithm: {_settings(algorithm)}",
        f"{plural(history.summary()['rounds'], 'round')} from seed {config['seed']}{which}",
        f"Certificate: {history.describe_certificate() or 'no certificate was computed'}",
        capital(find_note(history)),
        capital(describe_own_part(history)),
        "Versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()),
    ]
    return [f"- {line}." for line in lines if line]


def _tabulate(history: History) -> list[str]:
    """Return one line per client: its weight and every metric on every split."""
    shown = list(dict.fromkeys((r.split, r.metric) for r in history.metrics))
    columns = {f"{split} {metric}": history.last(metric, split) for split, metric in shown}
    for told, name in ((history.without_own, "without own part"), (history.alone, "alone")):
        if told is not None:
            columns[f"{told.split} {told.metric} {name}"] = told
    weights = history.weights[max(history.weights)] if history.weights else None
    head = ["client", *columns, *(["weight"] if weights is not None else [])]
    lines = [head, ["---"] + ["---:"] * (len(head) - 1)]
    for i, name in enumerate(history.names):
        cells = [
            "" if r is None or np.isnan(r.values[i]) else f"{r.values[i]:.4g} (n={r.sizes[i]})"
            for r in columns.values()
        ]
        cells += [f"{weights[i]:.4g}"] if weights is not None else []
        lines.append([name.replace("|", "\\|"), *cells])
    return [f"| {' | '.join(cells)} |" for cells in lines]


def _list_limits(history: History, predictor: Mapping[str, Any]) -> list[str]:
    lines, chosen = [], history.main_metric()
    if chosen is not None:
        metric, split = chosen
        clients = history.per_client(metric, split)
        if clients:
            sign = find_metric(metric).sign
            worst, best = (f(clients, key=lambda name: sign * clients[name]) for f in (min, max))
            lines.append(
                f"- Served worst by {split} {metric}: {worst} ({clients[worst]:.4g}); best: {best} "
                f"({clients[best]:.4g})."
            )
        unmeasured = [name for name in history.names if name not in clients]
        if unmeasured:
            unknown = join_names(unmeasured, 12)
            lines.append(f"- Without {split} samples, so not measured: {unknown}.")
        if split == "train":
            lines.append("- Measured on training samples alone: expect worse on new ones.")
    lines += [f"- {sentence}" for sentence in history.summary()["warnings"]]
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

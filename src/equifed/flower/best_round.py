"""For a stock Flower strategy: keep every site's metric, and end with the round of the best worst.

Give the sites ``validation`` data to evaluate on; a number on which a round was chosen flatters.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
from flwr.serverapp.strategy import Strategy
from typing_extensions import override

from equifed.metrics.metric import METRICS, find_metric
from equifed.report import write_report
from equifed.training.history import History
from equifed.training.tables import MetricRecord


class BestRound(Strategy):
    """A Flower strategy that ends with the model of the round that served the worst site best.

    Everything else is what ``strategy`` does. A round counts if every site that has ever answered
    an evaluation answered it; of equal rounds the earlier one is taken.

    Parameters
    ----------
    strategy : flwr.serverapp.strategy.Strategy
        Any that keeps Flower's own ``start``, with ``fraction_evaluate=1.0``.
    metric : str
        Key of the number in the sites' evaluation replies.
    higher_is_better : bool, optional
        Which way is better; known for names of equifed's metrics and for ``loss``.
    by : {"site", "fifth"}
        Choose by the worst site, or by the average of the worst fifth of the sites.
    names : mapping of int to str
        Names of the sites by node id; by default ``node`` and the id.
    size : str
        Key of the number of samples in the replies.

    Attributes
    ----------
    round : int, optional
        The chosen round; None: no round counts.
    """

    def __init__(
        self, strategy: Strategy, metric: str = "accuracy", *,
        higher_is_better: bool | None = None, by: Literal["site", "fifth"] = "site",
        names: Mapping[int, str] | None = None, size: str = "num-examples",
    ) -> None:  # fmt: skip
        if type(strategy).start is not Strategy.start:
            raise ValueError(
                f"{type(strategy).__name__} overrides start(), so its rounds cannot be observed; "
                "use a strategy with Flower's own start()."
            )
        if metric not in METRICS and higher_is_better is None:
            raise ValueError(
                f"Which way is {metric!r} better? Give higher_is_better=True or False."
            )
        if by not in ("site", "fifth"):
            raise ValueError(f"by must be 'site' or 'fifth', got {by!r}.")
        known = METRICS.get(metric)
        if known is not None and higher_is_better not in (None, known.sign > 0):
            raise ValueError(f"{metric!r} has a known direction; omit higher_is_better.")
        self.strategy, self._key, self._by, self._size = strategy, metric, by, size
        higher = known.sign > 0 if known is not None else bool(higher_is_better)
        self._sign = 1.0 if higher else -1.0
        plain = find_metric(metric).sign == self._sign
        self._metric = metric if plain else f"{metric}_score" if higher else f"{metric} (lower)"
        self._names = dict(names or {})
        self.round: int | None = None
        self._rounds: dict[int, dict[int, tuple[float, int]]] = {}
        self._sites: dict[int, None] = {}  # in the order of their first answers
        self._arrays: Any = None
        self._best: Any = None

    # -- what Flower asks ------------------------------------------------------------------------

    @override
    def summary(self) -> None:
        self.strategy.summary()

    @override
    def configure_train(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        return self.strategy.configure_train(server_round, arrays, config, grid)

    @override
    def aggregate_train(self, server_round: int, replies: Iterable[Any]) -> Any:
        return self.strategy.aggregate_train(server_round, replies)

    @override
    def configure_evaluate(self, server_round: int, arrays: Any, config: Any, grid: Any) -> Any:
        self._arrays = arrays
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    @override
    def aggregate_evaluate(self, server_round: int, replies: Iterable[Any]) -> Any:
        held = list(replies)
        answers = dict(self._read(reply) for reply in held if not reply.has_error())
        if answers:
            self._keep(server_round, answers)
        return self.strategy.aggregate_evaluate(server_round, held)

    @override
    def start(self, *args: Any, **settings: Any) -> Any:
        result = super().start(*args, **settings)
        if self.round is None:
            warnings.warn(
                f"No round was evaluated by all {len(self._sites)} sites, so the last model is "
                "returned; evaluate on all sites (fraction_evaluate=1.0).",
                stacklevel=2,
            )
        else:
            result.arrays = self._best
        return result

    # -- which round -----------------------------------------------------------------------------

    def _read(self, reply: Any) -> tuple[int, tuple[float, int]]:
        """Return a site's node id, its number and how many samples it is of."""
        node, records = int(reply.metadata.src_node_id), reply.content.metric_records.values()
        held = {key: value for record in records for key, value in record.items()}
        for key in (self._key, self._size):
            if not isinstance(held.get(key), int | float):
                raise ValueError(
                    f"{self._name(node)} sent no number {key!r} in its evaluation; it sent "
                    f"{', '.join(held) or 'none'}."
                )
        return node, (float(held[self._key]), int(held[self._size]))

    def _keep(self, round: int, answers: Mapping[int, tuple[float, int]]) -> None:
        """Keep the answers of a round, and its model if it is the best so far."""
        found = {node: one for node, one in answers.items() if math.isfinite(one[0])}
        self._rounds[round] = found
        if not found.keys() <= self._sites.keys():  # rounds without a new site cannot be compared
            self._sites |= dict.fromkeys(found)
            self.round = None
        if found.keys() != self._sites.keys():
            return
        if self.round is None or self._score(round) > self._score(self.round):
            self.round, self._best = round, copy.deepcopy(self._arrays)

    def _score(self, round: int) -> float:
        """Return how the worst sites are served; more is better."""
        values = np.sort([self._sign * value for value, _ in self._rounds[round].values()])
        count = 1 if self._by == "site" else math.ceil(len(values) / 5)
        return float(values[:count].mean())

    # -- afterwards ------------------------------------------------------------------------------

    def _name(self, node: int) -> str:
        return self._names.get(node, f"node {node}")

    def history(self, split: Literal["train", "validation", "test"] = "validation") -> History:
        """Return the sites' numbers as a history; those of the last round are of the chosen one."""
        history = History(tuple(map(self._name, self._sites)))
        for round in self._rounds:
            last = round == max(self._rounds) and self.round is not None
            found = self._rounds[self.round if last and self.round is not None else round]
            pairs = [found.get(node, (math.nan, 0)) for node in self._sites]
            values, sizes = np.array([v for v, _ in pairs]), np.array([n for _, n in pairs])
            history.metrics.append(MetricRecord(round, split, self._metric, values, sizes))
        if self.round is not None:
            told = {"kind": "validation", "round": self.round}
            event = {"event": "given out", "round": max(self._rounds), "given_out": told}
            history.events.append(event)
        history.check()
        return history

    def write_report(
        self, out: str | Path, split: Literal["train", "validation", "test"] = "validation"
    ) -> Path:
        """Write equifed's report about the sites (HTML and JSON)."""
        return write_report(self.history(split), out)

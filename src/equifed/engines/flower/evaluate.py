"""Per-client losses and accuracies, measured by the clients."""

from __future__ import annotations

import numpy as np

from equifed.arrays import Vector
from equifed.engines.flower.post import finite
from equifed.engines.flower.server import FlowerClients, packed
from equifed.engines.flower.wire import Reply, WireError
from equifed.metrics.evaluator import Evaluation
from equifed.streams import Stream

METRICS = ("loss", "accuracy")


class FlowerEvaluator:
    """Asks every client for its numbers; samples stay where they are.

    Under the policy "continue" a client that does not answer has no numbers in that evaluation;
    under the others it is missing, as in a round.

    Parameters
    ----------
    clients : FlowerClients
        All clients.
    splits : tuple of str
        Which splits to evaluate; those that a client lacks are left out.
    """

    def __init__(
        self,
        clients: FlowerClients,
        splits: tuple[str, ...] = ("train", "validation", "test"),
    ) -> None:
        self.clients = clients
        held = {split for hello in clients.roster.hellos for split in hello.sizes}
        self.splits = tuple(split for split in splits if split in held)

    def __call__(self, x: Vector) -> list[Evaluation]:
        """Return the per-client numbers of every split."""
        clients = self.clients
        if not self.splits:
            return []
        requests = clients.requests(
            "metrics", Stream(0, ("evaluate",)), {"splits": list(self.splits)}, {"x": packed(x)}
        )
        answers = clients.post.ask(requests, self._check, partial=True)
        if clients.post.patience.on_missing != "continue":
            answers.complete(clients.names)
        return [self._evaluation(split, answers.replies) for split in self.splits]

    def _evaluation(self, split: str, replies: dict[int, Reply]) -> Evaluation:
        n = len(self.clients.names)
        sizes = np.zeros(n, dtype=np.int64)
        found = {name: np.full(n, np.nan) for name in METRICS}
        for i, reply in replies.items():
            table = reply.numbers["splits"].get(split)
            if table is not None:
                sizes[i] = table["size"]
                for name, value in table["metrics"].items():
                    found[name][i] = value
        seen = {
            name: values
            for name, values in found.items()
            if name == "loss" or not np.isnan(values).all()
        }
        return Evaluation(split, sizes, seen)

    def _check(self, i: int, reply: Reply) -> None:
        held = self.clients.roster.hellos[i].sizes
        tables = reply.numbers.get("splits")
        if not isinstance(tables, dict) or set(tables) != set(held) & set(self.splits):
            raise WireError("measured other splits than asked for")
        for split, table in tables.items():
            if not isinstance(table, dict) or table.get("size") != held[split]:
                raise WireError(f"measured another number of {split} samples than it said it has")
            metrics = table.get("metrics")
            if not isinstance(metrics, dict) or not set(metrics) <= set(METRICS):
                raise WireError("sent unknown metrics")
            if held[split]:
                for name, value in metrics.items():
                    finite(f"{split} {name}", value)

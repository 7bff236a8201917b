"""One call of ``local_steps``: at once, or together with the first sum of its result."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from equifed.contract.arrays import Losses, Weights
from equifed.contract.clients import Moved
from equifed.contract.local import LocalSGD
from equifed.flower.mailbox import Check, finite
from equifed.flower.vectors import FlowerVectors, Pending
from equifed.flower.wire import Reply, Request, WireError

if TYPE_CHECKING:
    from equifed.flower.server import FlowerClients

PARTS = ("displacement", "snapshot", "average", "mean_gradient")


def tag_of(requests: dict[int, Request]) -> str:
    """Return the tag that all requests of an exchange share."""
    return next(iter(requests.values())).tag


class Local:
    """One call of ``local_steps``: now, or together with the first sum."""

    def __init__(
        self,
        clients: FlowerClients,
        requests: dict[int, Request],
        work: LocalSGD,
        control: FlowerVectors | None,
    ) -> None:
        self.clients, self.requests, self.work, self.control = clients, requests, work, control
        self.steps = work.steps_for(clients.sizes)
        asked = (True, work.snapshot is not None, work.average, work.mean_gradient)
        self.parts = [part for part, wanted in zip(PARTS, asked, strict=True) if wanted]
        self.thresholds: Losses | None = None

    def moved(self) -> Moved:
        """Return the handles; where vectors are hidden, before anything was asked."""
        clients, tag = self.clients, tag_of(self.requests)
        pending, rows = Pending(self.ask), dict[str, Tensor]()
        if not clients.private:
            replies = self._replies()
            rows = {part: clients.rows(replies, part) for part in self.parts}
            pending.done = True
        elif self.work.hinge is not None:  # the thresholds are wanted at once
            pending.run()
        vectors = {
            part: FlowerVectors(
                clients,
                [f"{tag}/{part}"] * len(clients.index),
                rows.get(part),
                pending=pending,
            )
            for part in self.parts
        }
        return Moved(
            vectors["displacement"],
            self.steps,
            vectors.get("snapshot"),
            vectors.get("average"),
            vectors.get("mean_gradient"),
            self.thresholds,
        )

    def ask(self, wanted: tuple[str, Weights] | None) -> Tensor | None:
        """Run the exchange, alone or with a hidden sum of one part."""
        if wanted is None:
            self._replies()
            return None
        part, weights = wanted
        hidden = self.clients.hidden
        assert hidden is not None
        return self.clients.tensor(
            hidden.total(
                self.clients,
                self.requests,
                weights,
                part,
                lambda r, c: self.clients.ask(r, self._both(c), self.control),
            )
        )

    def _both(self, check: Check) -> Check:
        def both(i: int, reply: Reply) -> None:
            self.check(i, reply)
            check(i, reply)

        return both

    def _replies(self) -> dict[int, Reply]:
        answers = self.clients.ask(self.requests, self.check, self.control)
        replies = answers.complete(self.clients.names)
        if self.work.hinge is not None:
            self.thresholds = self.clients.numbers(replies, "threshold")
        return replies

    def check(self, i: int, reply: Reply) -> None:
        """Refuse a reply whose steps, threshold or vectors cannot be used."""
        due = int(self.steps[int((self.clients.index == i).argmax())])
        if reply.numbers.get("steps") != due:
            raise WireError(f"took another number of local steps than {due}")
        if self.work.hinge is not None:
            finite("threshold", reply.numbers.get("threshold"))
        if not self.clients.private:
            for part in self.parts:
                self.clients.check_vector(reply, part, "squared length of the local update")

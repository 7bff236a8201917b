"""Local work on the clients, asked for at once or together with the first hidden sum."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from equifed.contract.arrays import Losses, Weights
from equifed.contract.clients import Moved
from equifed.contract.local import LocalWork
from equifed.flower.mailbox import Answers, Check
from equifed.flower.messenger import Messenger, Requests
from equifed.flower.secure.ledger import Sum
from equifed.flower.vectors import FlowerVectors
from equifed.flower.wire import Reply, WireError, expect_number


class RequestedWork:
    """One call of ``local_steps``: asked for at once, or together with the first hidden sum.

    ``control`` are vectors on the clients that the work refers to.
    """

    def __init__(
        self,
        messenger: Messenger,
        requests: Requests,
        work: LocalWork,
        control: FlowerVectors | None,
        x: Tensor,
        target: Tensor | None,
    ) -> None:
        self.messenger, self.requests, self.work, self.control = messenger, requests, work, control
        self.x, self.target = x, target
        self.steps = work.steps_for(messenger.members.sizes[messenger.index])
        self.parts = list(work.results)
        self.thresholds: Losses | None = None
        self.done = False

    def start(self) -> Moved:
        """Return the handles; where vectors are hidden, before anything was asked."""
        rows: dict[str, Tensor] = {}
        if self.messenger.hidden is None:
            replies = self.run()
            rows = {part: self.messenger.read_rows(replies, part) for part in self.parts}
        elif self.work.hinge is not None:  # the thresholds are wanted at once
            self.run()
        tag, n = next(iter(self.requests.values())).tag, len(self.messenger.index)
        vectors = {
            part: FlowerVectors(
                self.messenger, [f"{tag}/{part}"] * n, rows.get(part), source=self, x=self.x
            )
            for part in self.parts
        }
        return Moved(steps=self.steps, thresholds=self.thresholds, **vectors)

    def run(self) -> dict[int, Reply]:
        """Ask for the work alone."""
        replies = self._ask(self.requests, self.check).complete(self.messenger.members.names)
        if self.work.hinge is not None:
            self.thresholds = self.messenger.read_numbers(replies, "threshold")
        self.done = True
        return replies

    def run_and_sum(self, part: str, weights: Weights) -> Tensor:
        """Ask for the work and a hidden sum of one part of its result, in one exchange."""

        def ask(requests: Requests, check_sum: Check) -> Answers:
            def check(i: int, reply: Reply) -> None:
                self.check(i, reply)
                check_sum(i, reply)

            return self._ask(requests, check)

        total = self.messenger.sum_hidden(self.requests, weights, part, ask)
        self.done = True
        return total

    def stand_in(self, part: str, wanted: Sum, weights: Weights) -> Tensor | None:
        """Return a sum of the work's results from sums opened at its model; None without any.

        Displacements as if every step were the first one, iterates on the line to the last one.
        """
        hidden = self.messenger.hidden
        assert hidden is not None

        def combine(kind: str, shares: Weights) -> Tensor | None:
            row = np.zeros_like(wanted.row)
            row[self.messenger.index] = shares
            return hidden.ledger.stand_in(replace(wanted, kind=kind, row=row))

        if part in ("snapshot", "average"):
            steps = np.asarray(self.steps, dtype=np.float64)
            taken = np.minimum(self.work.snapshot or 0, steps)
            way = taken / steps if part == "snapshot" else (steps + 1) / (2 * steps)
            moved = combine("displacement", weights * way)
            return None if moved is None else float(weights.sum()) * self.x - moved
        if part != "displacement":
            return None
        lengths = weights * self.work.lr * self.steps
        corrected = self.control is not None and self.control.kind == "gradient"
        whole = corrected and self.work.correction == 1  # c_i is g_i(x), which it takes away
        left = 1 - self.work.correction if corrected else 1.0
        first = torch.zeros_like(self.x) if whole else combine("gradient", left * lengths)
        if first is None or self.target is None:
            return first
        return first + self.work.correction * float(lengths.sum()) * self.target

    def check(self, i: int, reply: Reply) -> None:
        """Refuse a reply whose steps, threshold or vectors cannot be used."""
        due = int(self.steps[self.messenger.locate(i)])
        if reply.numbers.get("steps") != due:
            raise WireError(f"took another number of local steps than {due}")
        if self.work.hinge is not None:
            expect_number("threshold", reply.numbers.get("threshold"), self.messenger.dtype)
        if self.messenger.hidden is None:
            for part in self.parts:
                self.messenger.check_vector(reply, part, "squared length of the local update")

    def _ask(self, requests: Requests, check: Check) -> Answers:
        asker = self.messenger.mailbox if self.control is None else self.control
        return asker.ask(requests, check)

"""Handles for vectors that clients keep, local work that gives them, what the server may see."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract.arrays import BlockMatrix, ClientVectors, Losses, Weights
from equifed.contract.clients import Moved
from equifed.contract.local import LocalWork
from equifed.contract.streams import Stream
from equifed.engines.ordered_sums import DenseVectors
from equifed.flower.mailbox import Answers, Check
from equifed.flower.messenger import Messenger, Requests
from equifed.flower.secure.ledger import LEAST_MEMBERS, PrivacyError, Sum
from equifed.flower.wire import Reply, Sent, WireError, expect_number, pack_metric, pack_tensor

Remake = Callable[[Messenger], None]
"""Lets clients compute again what they lost."""


class FlowerVectors(ClientVectors):
    """One vector per client, on the clients; under privacy "none" the server has them too.

    ``keys`` say where each client keeps its own ("" stands for zero), ``rows`` are those the server
    was given, ``remake`` computes them again where they were lost, ``source`` is local work that
    may not have been asked for yet, ``x`` their model (a memory of earlier rounds has none).
    """

    def __init__(
        self,
        messenger: Messenger,
        keys: Sequence[str],
        rows: Tensor | None = None,
        remake: Remake | None = None,
        source: RequestedWork | None = None,
        x: Tensor | None = None,
    ) -> None:
        self.messenger, self.keys, self.rows = messenger, tuple(keys), rows
        self.remake, self.source, self.x = remake, source, x
        self.withheld = False  # whether a sum of them could not be opened

    @override
    def weighted_sum(self, weights: Weights) -> Tensor:
        # Local work that was not requested yet is fused with the sum into one exchange.
        hidden = self.messenger.hidden
        if hidden is None:
            return DenseVectors(self.recall()).weighted_sum(weights)
        wanted = self._describe(weights)
        reason = hidden.ledger.refuse(wanted)
        if reason is not None:
            return self._stand_in(wanted, weights, reason)
        if self.source is not None and not self.source.done:
            return self.source.run_and_sum(wanted)
        return self.messenger.open_sum(wanted, self._write_requests("sum"), ask=self.ask)

    @override
    def weighted_difference(self, old: ClientVectors, weights: Weights) -> Tensor:
        # What was kept in an earlier round was summed then, maybe with others: alone it is not
        # summed again. Where even this sum may not be opened it is zero, and nobody keeps the new.
        assert isinstance(old, FlowerVectors)
        hidden = self.messenger.hidden
        if hidden is None:
            return self.weighted_sum(weights) - old.weighted_sum(weights)
        self.settle()
        wanted = replace(self._describe(weights), kind=f"change of {self.kind}")
        reason = hidden.ledger.refuse(wanted)
        if reason is not None:
            self.withheld = True
            hidden.ledger.notes.append(f"{reason}: what clients keep stays as it was")
            return torch.zeros_like(self._model())
        requests = self._write_requests("sum")
        for i, request in requests.items():
            key = old.key_of(i)
            pins = [*request.args["pins"], *([key] if key else [])]
            request.args.update(minus=key, pins=pins)
        return self.messenger.open_sum(wanted, requests, ask=self.ask)

    @override
    def allows(self, weights: Weights) -> bool:
        hidden = self.messenger.hidden
        return hidden is None or hidden.ledger.refuse(self._describe(weights)) is None

    @property
    def kind(self) -> str:
        """What the vectors are."""
        return self.keys[0].rpartition("/")[2]

    def _model(self) -> Tensor:
        if self.x is None:
            raise PrivacyError(
                "Vectors that clients keep from earlier rounds are not summed under hidden sums: "
                "the difference to that round's sum would reveal the clients missing now "
                f"({self._name_missing() or 'none'}). "
                "Resume when they are back, let the run wait for them with on-missing = 'wait', "
                "or use an algorithm that sums nothing kept: DRFA, SCAFF-PD."
            )
        return self.x

    def _describe(self, weights: Weights) -> Sum:
        return self.messenger.describe_sum(self.kind, self._model(), weights)

    def _stand_in(self, wanted: Sum, weights: Weights, reason: str) -> Tensor:
        """Return what was opened at this model in place of a sum that may not be."""
        ledger = self.messenger.ledger
        found = ledger.stand_in(wanted)
        if found is None and self.source is not None:
            found = self.source.stand_in(self.kind, weights)
        if found is None:
            self._explain(wanted, reason)
        ledger.notes.append(f"{reason}: the step is finished from the sums that were opened before")
        return found

    def _explain(self, wanted: Sum, reason: str) -> NoReturn:
        if len(wanted.members) < LEAST_MEMBERS or "nearly so" in reason:
            raise PrivacyError(
                f"This sum would show one client's vector ({reason}). Use an objective with a cap "
                "on the weights (CVaR, or a chi-square penalty), let more clients take part, or "
                "give up hidden sums with privacy = 'none'."
            )
        gone = self._name_missing()
        cure = (
            f"those who take no part now ({gone}). Resume when they are back, or let the run wait "
            "for them with on-missing = 'wait'."
            if gone
            else "those who were missing before. Start the run again."
        )
        raise PrivacyError(
            f"A sum of the clients' {self.kind}s cannot be opened: {reason}, and the difference "
            f"would show {cure}"
        )

    def _name_missing(self) -> str:
        here = set(self.messenger.index.tolist())
        names = self.messenger.members.names
        return ", ".join(name for i, name in enumerate(names) if i not in here)

    @override
    def squared_norms(self, scale: BlockMatrix | None = None) -> Losses:
        if self.rows is not None:
            return DenseVectors(self.rows).squared_norms(scale)
        self.settle()
        requests = self._write_requests("norms", pack_metric(scale))
        answers = self.ask(requests, self.messenger.check_norm)
        return self.messenger.read_numbers(answers.complete(self.messenger.members.names), "norm")

    @property
    @override
    def at_hand(self) -> bool:
        return self.rows is not None

    @property
    @override
    def claimed(self) -> bool:
        return self.messenger.hidden is not None

    def recall(self) -> Tensor:
        """Return the vectors themselves, asking for them if need be; privacy "none" only."""
        if self.rows is None:
            answers = self.ask(
                self._write_requests("recall"),
                lambda i, reply: self.messenger.check_vector(reply, "vector"),
            )
            replies = answers.complete(self.messenger.members.names)
            self.rows = self.messenger.read_rows(replies, "vector")
        return self.rows

    def settle(self) -> None:
        """Make sure that the clients hold these vectors."""
        if self.source is not None and not self.source.done:
            self.source.run()

    def key_of(self, client: int) -> str:
        """Return the key of a client by its position in the federation."""
        return self.keys[self.messenger.locate(client)]

    def ask(self, requests: Requests, check: Check) -> Answers:
        """Ask; those that lost these vectors get or remake them and are asked again."""
        mailbox = self.messenger.mailbox
        answers = mailbox.ask(requests, check)
        stale = [i for i, failure in answers.failures.items() if failure.kind == "stale"]
        if not stale or (self.rows is None and self.remake is None):
            return answers
        again = {i: requests[i] for i in stale}
        if self.rows is not None:
            for i, request in again.items():
                row = pack_tensor(self.rows[self.messenger.locate(i)])
                again[i] = replace(request, arrays={**request.arrays, "control": row})
        elif self.remake is not None:
            self.remake(self.messenger.subset(stale))
        more = mailbox.ask(again, check)
        left = {i: f for i, f in answers.failures.items() if i not in stale}
        return Answers({**answers.replies, **more.replies}, {**left, **more.failures})

    def _write_requests(self, op: str, arrays: Sent | None = None) -> Requests:
        """Return requests about these vectors."""
        stream = Stream(0, (self.keys[0] or "zero", op))
        requests = self.messenger.write_requests(op, stream, {}, arrays or {})
        for i, request in requests.items():
            key = self.key_of(i)
            request.args.update(key=key, pins=[*request.args["pins"], *([key] if key else [])])
        return requests


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

    def run_and_sum(self, wanted: Sum) -> Tensor:
        """Ask for the work and a hidden sum of one part of its result, in one exchange."""

        def ask(requests: Requests, check_sum: Check) -> Answers:
            def check(i: int, reply: Reply) -> None:
                self.check(i, reply)
                check_sum(i, reply)

            return self._ask(requests, check)

        total = self.messenger.open_sum(wanted, self.requests, wanted.kind, ask)
        self.done = True
        return total

    def stand_in(self, part: str, weights: Weights) -> Tensor | None:
        """Return a sum of the work's results from sums opened at its model; None without any.

        Displacements as if every step were the first one, iterates on the line to the last one.
        """

        def combine(kind: str, shares: Weights) -> Tensor | None:
            wanted = self.messenger.describe_sum(kind, self.x, shares)
            return self.messenger.ledger.stand_in(wanted)

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
        if first is not None and self.target is not None:
            first = first + self.work.correction * float(lengths.sum()) * self.target
        scale = self.work.scale
        return first if first is None or scale is None else scale.multiply(first)

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

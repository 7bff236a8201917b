"""Handles for vectors that clients keep, and the local work that some of them come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor
from typing_extensions import override

from equifed.contract.arrays import Losses, Weights
from equifed.contract.clients import ClientVectors, Moved
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.in_process import DenseVectors
from equifed.flower.mailbox import Answers, Check
from equifed.flower.messenger import Messenger, Requests, pack_tensor
from equifed.flower.wire import Reply, WireError, expect_number

Remake = Callable[[Messenger], None]
"""Lets clients compute again what they lost."""


class FlowerVectors(ClientVectors):
    """One vector per client, on the clients; under privacy "none" the server has them too.

    Parameters
    ----------
    messenger : Messenger
        Reaches those whose vectors these are.
    keys : sequence of str
        Under which key each of them keeps its vector; "" stands for zero.
    rows : Tensor (n, d), optional
        The vectors, where the server was given them.
    remake : callable, optional
        How to compute the vectors again on clients that lost them.
    source : LocalWork, optional
        Local work that these vectors are the result of, if it may not have been asked for yet.
    """

    def __init__(
        self,
        messenger: Messenger,
        keys: Sequence[str],
        rows: Tensor | None = None,
        remake: Remake | None = None,
        source: LocalWork | None = None,
    ) -> None:
        self.messenger, self.keys, self.rows = messenger, tuple(keys), rows
        self.remake, self.source = remake, source

    @override
    def weighted_sum(self, weights: Weights) -> Tensor:
        # Local work that nobody asked for yet is fused with the sum into one exchange.
        if self.messenger.hidden is None:
            return DenseVectors(self.recall()).weighted_sum(weights)
        if self.source is not None and not self.source.done:
            return self.source.run_and_sum(self.keys[0].rpartition("/")[2], weights)
        requests = self._write_requests("sum")
        return self.messenger.sum_hidden(requests, weights, "vector", self.ask)

    @override
    def squared_norms(self) -> Losses:
        if self.rows is not None:
            return DenseVectors(self.rows).squared_norms()
        self.settle()
        answers = self.ask(self._write_requests("norms"), self.messenger.check_norm)
        return self.messenger.read_numbers(answers.complete(self.messenger.members.names), "norm")

    @property
    def at_hand(self) -> bool:
        """Whether norms cost neither an exchange nor work done again."""
        return self.rows is not None

    @property
    def claimed(self) -> bool:
        """Whether norms are the clients' own word, because nobody sees their vectors."""
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

    def _write_requests(self, op: str) -> Requests:
        """Return requests about these vectors."""
        stream = Stream(0, (self.keys[0] or "zero", op))
        requests = self.messenger.write_requests(op, stream, {}, {})
        for i, request in requests.items():
            key = self.key_of(i)
            request.args.update(key=key, pins=[*request.args["pins"], *([key] if key else [])])
        return requests


class LocalWork:
    """One call of ``local_steps``: asked for at once, or together with the first hidden sum.

    ``control`` are vectors on the clients that the work refers to.
    """

    def __init__(
        self,
        messenger: Messenger,
        requests: Requests,
        work: LocalSGD,
        control: FlowerVectors | None,
    ) -> None:
        self.messenger, self.requests, self.work, self.control = messenger, requests, work, control
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
            part: FlowerVectors(self.messenger, [f"{tag}/{part}"] * n, rows.get(part), source=self)
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

"""The clients contract on Flower's ``Grid``."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equifed.contract.arrays import Index, Losses, Vector, Weights
from equifed.contract.clients import ClientVectors, Moved, Traffic, check_index
from equifed.contract.curvature import Curvature
from equifed.contract.evaluation import SPLITS, Evaluation
from equifed.contract.local import LocalSGD
from equifed.contract.memory import KeyedMemory
from equifed.contract.streams import Stream
from equifed.engines.in_process import check_local_arguments
from equifed.flower.evaluate import check_metrics, held_splits, read_evaluation
from equifed.flower.local_work import Local, tag_of
from equifed.flower.mailbox import Answers, Check, Mailbox, finite, positions
from equifed.flower.members import Members
from equifed.flower.vectors import FlowerVectors
from equifed.flower.wire import Reply, Request, Sent, expect, pack
from equifed.models.curvature import known_curvature

if TYPE_CHECKING:
    from equifed.flower.secure.sums import HiddenSums


class FlowerClients:
    """Clients on the nodes of a Flower federation.

    Every exchange is tagged with its round, phase and try and may be repeated without harm. With
    ``hidden`` sums the server never receives a client's vector; without, vectors come with the
    losses, which saves an exchange.

    Parameters
    ----------
    post : Mailbox
        The mailbox.
    roster : Members
        Who is there, with what data.
    hidden : HiddenSums, optional
        How to sum without seeing the terms.
    """

    def __init__(self, post: Mailbox, roster: Members, hidden: HiddenSums | None = None) -> None:
        self.post, self.roster, self.hidden = post, roster, hidden
        self.traffic: Traffic = post.traffic
        self.index: Index = np.arange(len(roster.names))
        self.model = roster.engine.model
        self._tries: dict[str, int] = {}
        self._pins: dict[int, str] = {}
        self._kept: dict[tuple[int, str], Tensor] = {}

    @property
    def names(self) -> Sequence[str]:
        """Names of all clients of the federation."""
        return self.roster.names

    @property
    def sizes(self) -> Index:
        """Training samples of those that take part."""
        return self.roster.sizes[self.index]

    @property
    def private(self) -> bool:
        """Whether vectors stay with the clients."""
        return self.hidden is not None

    def initial(self, stream: Stream) -> Vector:
        """Return a freshly initialised model."""
        return self.roster.engine.initial(stream)

    def parameters(self, x: Vector) -> dict[str, Vector]:
        """Return the model's parameters by name and in their shapes."""
        return self.roster.engine.parameters(x)

    def subset(self, index: Iterable[int] | Index) -> Self:
        """Return the same engine restricted to clients ``index``: positions in ``names``."""
        part = copy.copy(self)
        part.index = check_index(index, len(self.names))
        return part

    # -- the questions ----------------------------------------------------------------------------

    def evaluate(self, x: Vector, splits: Sequence[str] = SPLITS) -> list[Evaluation]:
        """Return what the model is worth to all clients, measured by them.

        Under the policy "continue" a client that does not answer has no numbers in that evaluation;
        under the others it is missing, as in a round.
        """
        held = held_splits(self.roster, splits)
        if not held:
            return []
        requests = self.requests(
            "metrics", Stream(0, ("evaluate",)), {"splits": list(held)}, {"x": packed(x)}
        )
        answers = self.post.ask(requests, partial(check_metrics, self.roster, held), partial=True)
        if self.post.patience.on_missing != "continue":
            answers.complete(self.names)
        return [read_evaluation(split, answers.replies, len(self.names)) for split in held]

    def curvature(self) -> Curvature | str:
        """Return bounds on the curvature of all clients' losses, or why none are known."""
        return known_curvature(self.model, len(self.names))

    def group(self) -> None:
        """Return None: the server is one process."""

    # -- the verbs --------------------------------------------------------------------------------

    def losses(self, x: Vector, stream: Stream, batch_size: int | None = None) -> Losses:
        """Return f_i(x) on all of each client's samples, or on one minibatch."""
        requests = self.requests("losses", stream, {"batch_size": batch_size}, {"x": packed(x)})
        replies = self.post.ask(requests, _check_loss).complete(self.names)
        return self.numbers(replies, "loss")

    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        """Return f_i(x) and a handle for the gradients, in one exchange."""
        args = {"batch_size": batch_size, "give": not self.private}
        requests = self.requests("gradient", stream, args, {"x": packed(x)})
        tag = tag_of(requests)

        def remake(clients: FlowerClients) -> None:
            again = {i: requests[i] for i in positions(clients.index)}
            clients.post.ask(again, clients._check_gradient).complete(clients.names)

        replies = self.post.ask(requests, self._check_gradient).complete(self.names)
        vectors = FlowerVectors(
            self,
            [f"{tag}/gradient"] * len(self.index),
            None if self.private else self.rows(replies, "gradient"),
            remake,
        )
        return self.numbers(replies, "loss"), vectors

    def local_steps(
        self,
        x: Vector,
        work: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Vector | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        """Let every client do ``work`` from x.

        Where vectors are hidden the work is asked for together with the first sum of its result.
        """
        check_local_arguments(work, control, target, slopes)
        assert control is None or isinstance(control, FlowerVectors)
        arrays = {"x": packed(x)} if target is None else {"x": packed(x), "target": packed(target)}
        args = {"work": work.to_dict(), "give": not self.private, "control": None, "slope": None}
        requests = self.requests("local", stream, args, arrays)
        for k, i in enumerate(positions(self.index)):
            if control is not None:
                requests[i].args["control"] = control.key_of(i)
            if slopes is not None:
                requests[i].args["slope"] = float(slopes[k])
        return Local(self, requests, work, control).moved()

    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        """Return what clients ``index`` keep of a memory of all clients; zeros if it is None."""
        keys = [""] * len(self.names)
        if vectors is not None:
            assert isinstance(vectors, KeyedMemory)
            keys = list(vectors.keys)
        self._pins.update({i: key for i, key in enumerate(keys) if key})
        zero = torch.zeros(self.model.size, dtype=self.model.dtype, device=self.model.device)
        rows = [self._kept.get((i, keys[i])) if keys[i] else zero for i in positions(index)]
        whole = [row for row in rows if row is not None]
        known = torch.stack(whole) if len(whole) == len(rows) and not self.private else None
        return FlowerVectors(self.subset(index), [keys[i] for i in positions(index)], known)

    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        """Return the memory of all clients after those in ``index`` replaced their vector."""
        assert memory is None or isinstance(memory, KeyedMemory)
        assert isinstance(vectors, FlowerVectors)
        vectors.settle()
        keys = [""] * len(self.names) if memory is None else list(memory.keys)
        before = {(i, key) for i, key in enumerate(keys) if key}
        for k, i in enumerate(positions(index)):
            keys[i] = vectors.key_of(i)
            if vectors.rows is not None:
                self._kept[i, keys[i]] = vectors.rows[k]
        wanted = before | set(enumerate(keys))
        for old in [key for key in self._kept if key not in wanted]:
            del self._kept[old]
        return KeyedMemory(tuple(keys))

    # -- what handles ask for ---------------------------------------------------------------------

    def hidden_sum(self, vectors: FlowerVectors, weights: Weights) -> Tensor:
        """Return a weighted sum of vectors that the clients keep, without seeing them."""
        assert self.hidden is not None
        requests = self._about("sum", vectors)
        return self.tensor(
            self.hidden.total(
                self, requests, weights, "vector", lambda r, c: self.ask(r, c, vectors)
            )
        )

    def norms(self, vectors: FlowerVectors) -> Losses:
        """Return |v_i|^2 of vectors that the clients keep."""
        answers = self.ask(self._about("norms", vectors), _check_norm, vectors)
        return self.numbers(answers.complete(self.names), "norm")

    def recalled(self, vectors: FlowerVectors) -> Tensor:
        """Return vectors that the clients keep; privacy "none" only."""

        def check(i: int, reply: Reply) -> None:
            self.check_vector(reply, "vector")

        answers = self.ask(self._about("recall", vectors), check, vectors)
        return self.rows(answers.complete(self.names), "vector")

    def requests(
        self, op: str, stream: Stream, args: dict[str, Any], arrays: Sent
    ) -> dict[int, Request]:
        """Return one tagged request for each client that takes part."""
        where = "/".join(str(word) for word in stream.address) or op
        tries = self._tries.get(where, 0)
        self._tries[where] = tries + 1
        common = {"seed": stream.seed, "address": list(stream.address), "round": _round(stream)}
        return {
            i: Request(
                op,
                self.roster.run,
                f"{where}#{tries}",
                i,
                {**common, **args, "pins": [self._pins[i]] if i in self._pins else []},
                dict(arrays),
            )
            for i in positions(self.index)
        }

    def _about(self, op: str, vectors: FlowerVectors) -> dict[int, Request]:
        """Return requests about vectors that clients keep."""
        name = vectors.keys[0] or "zero"
        requests = self.requests(op, Stream(0, (name, op)), {}, {})
        for i, request in requests.items():
            key = vectors.key_of(i)
            request.args.update(key=key, pins=[*request.args["pins"], *([key] if key else [])])
        return requests

    def ask(
        self, requests: dict[int, Request], check: Check, about: FlowerVectors | None
    ) -> Answers:
        """Ask; those that lost the vectors of ``about`` get or remake them and are asked again."""
        answers = self.post.ask(requests, check)
        stale = [i for i, failure in answers.failures.items() if failure.kind == "stale"]
        if not stale or about is None or (about.rows is None and about.remake is None):
            return answers
        if about.rows is None and about.remake is not None:
            about.remake(self.subset(stale))
        again = {i: requests[i] for i in stale}
        if about.rows is not None:
            for i, request in again.items():
                row = about.rows[int((about.clients.index == i).argmax())]
                again[i] = replace(request, arrays={**request.arrays, "control": packed(row)})
        more = self.post.ask(again, check)
        answers.replies.update(more.replies)
        left = {i: f for i, f in answers.failures.items() if i not in stale}
        answers.failures = {**left, **more.failures}
        return answers

    # -- small parts ------------------------------------------------------------------------------

    def _check_gradient(self, i: int, reply: Reply) -> None:
        _check_loss(i, reply)
        if not self.private:
            self.check_vector(reply, "gradient", "squared gradient norm")

    def check_vector(self, reply: Reply, name: str, what: str = "squared length") -> None:
        """Refuse a vector of another kind, or one that is not finite."""
        vector = expect(reply.arrays, name, self.model.size, str(self.model.dtype)[6:])
        # Where a square overflows the vector is as unusable as one that holds an infinity.
        with np.errstate(over="ignore", invalid="ignore"):
            finite(what, float(np.square(vector.astype(np.float64)).sum()))

    def rows(self, replies: dict[int, Reply], name: str) -> Tensor:
        """Return one array of every reply, in the order of the clients."""
        rows = [torch.as_tensor(np.array(replies[i].arrays[name])) for i in positions(self.index)]
        return torch.stack(rows).to(self.model.device)

    def numbers(self, replies: dict[int, Reply], name: str) -> Losses:
        """Return one number of every reply, in the order of the clients."""
        return np.array([float(replies[i].numbers[name]) for i in positions(self.index)])

    def tensor(self, total: NDArray[np.float64]) -> Tensor:
        """Return a sum in the model's precision."""
        return torch.as_tensor(total).to(self.model.device, self.model.dtype)


def packed(vector: Tensor) -> Any:
    """Return a vector ready to be sent to many clients."""
    return pack(vector.detach().to("cpu").contiguous().numpy())


def _check_loss(i: int, reply: Reply) -> None:
    finite("loss", reply.numbers.get("loss"))


def _check_norm(i: int, reply: Reply) -> None:
    finite("squared norm", reply.numbers.get("norm"))


def _round(stream: Stream) -> int:
    """Return the round that a stream's address names, or 0."""
    words = stream.address
    after = [b for a, b in pairwise(words) if a == "round"]
    return int(after[0]) if after and isinstance(after[0], int) else 0

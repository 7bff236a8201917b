"""The clients contract on Flower's ``Grid``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from equifed.contract.arrays import ClientVectors, Index, KeyedMemory, Losses, Vector, Weights
from equifed.contract.clients import Clients, Moved
from equifed.contract.evaluation import SPLITS, ClientDetail, Details, Evaluation, SampleMetric
from equifed.contract.local import LocalSGD
from equifed.contract.streams import Stream
from equifed.engines.evaluate import check_metrics
from equifed.flower.mailbox import Answers, Mailbox
from equifed.flower.members import Members
from equifed.flower.messenger import Messenger, SecureSums
from equifed.flower.questions import FlowerQuestions
from equifed.flower.vectors import FlowerVectors, RequestedWork
from equifed.flower.wire import ALWAYS, Reply, WireError, expect_number, pack_metric, pack_tensor
from equifed.metrics.metric import METRICS, find_metric


class FlowerClients(FlowerQuestions, Clients):
    """Clients on the nodes of a Flower federation; arguments as for :class:`Messenger`.

    With ``hidden`` sums the server never receives a client's vector; without, vectors come with the
    losses, which saves an exchange.
    """

    def __init__(
        self, mailbox: Mailbox, members: Members, hidden: SecureSums | None = None
    ) -> None:
        super().__init__(mailbox, members, hidden)
        self._kept: dict[tuple[int, str], Tensor] = {}
        self.deviations, self._own_errors, self._own_rounds = {}, {}, {}

    @property
    @override
    def names(self) -> Sequence[str]:
        return self.members.names

    @property
    @override
    def hides_sums(self) -> bool:
        return self.hidden is not None

    @property
    @override
    def sizes(self) -> Index:
        return self.members.sizes[self.index]

    @override
    def initial(self, stream: Stream) -> Vector:
        if self.model.own_size:  # the sites draw their own parts from here
            self.common["start"] = [stream.seed, *stream.address]
        return self.members.engine.initial(stream)

    @override
    def flatten(self, model: Any) -> Vector:
        if self.keeps_own():
            raise ValueError(
                "A federation whose sites keep own parts starts from the model that it draws."
            )
        return self.members.engine.flatten(model)

    def flatten_shared(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the model vector of a finished run, whose own parts are not here."""
        return self.members.engine.flatten(parameters)

    @override
    def parameters(self, x: Vector) -> dict[str, Vector]:
        # Shared ones alone: own parts are not here.
        own = x.new_zeros(self.model.own_size)
        named = self.model.state(torch.cat([x, own])).items()
        shared = {n: p for n, p in named if self.model.names.get(n) not in self.model.own_shapes}
        return {n: p.to("cpu").contiguous().clone() for n, p in shared.items()}

    # -- the questions ----------------------------------------------------------------------------

    @override
    def evaluate(
        self, x: Vector, splits: Sequence[str] = SPLITS, metrics: Sequence[SampleMetric] = ()
    ) -> list[Evaluation]:
        # Under the policy "continue" a client that does not answer has no numbers in the
        # evaluation; under the others it is missing, as in a round.
        held = {split for hello in self.members.hellos for split in hello.sizes}
        wanted, asked = [split for split in splits if split in held], self._name(metrics)
        if not wanted:
            return []
        answers = self._ask_metrics(x, wanted, asked, describe=False)
        if self.mailbox.deadlines.on_missing != "continue":
            answers.complete(self.names)
        self.members.note_unusable(answers.failures)
        n, names = len(self.names), dict.fromkeys((*ALWAYS, *asked))
        return [read_evaluation(split, answers.replies, n, names) for split in wanted]

    @override
    def describe(self, x: Vector, split: str, metrics: Sequence[SampleMetric]) -> Details | None:
        # Where sums are hidden nothing is asked: label shares and groups would tell more of a
        # client than its metrics do.
        if self.hidden is not None:
            return None
        replies = self._ask_metrics(x, [split], self._name(metrics), describe=True).replies
        found: list[ClientDetail | None] = [None] * len(self.names)
        for i, reply in replies.items():
            told = reply.numbers["detail"]
            found[i] = None if told is None else ClientDetail.from_dict(told)
        return Details(split, tuple(found))

    def _name(self, metrics: Sequence[SampleMetric]) -> list[str]:
        """Return the names of metrics that every client knows and these data have."""
        own = [metric.name for metric in metrics if METRICS.get(metric.name) is not metric]
        if own:
            raise ValueError(
                f"The metric {own[0]} is a function of your own, which is not sent to clients; on "
                f"Flower choose from {', '.join(METRICS)}."
            )
        check_metrics(metrics, self.members.hellos[0].schema.classes, self.model.loss)
        return [metric.name for metric in metrics]

    def _ask_metrics(
        self, x: Vector, splits: Sequence[str], names: Sequence[str], describe: bool
    ) -> Answers:
        where, arrays = Stream(0, ("evaluate",)), {"x": pack_tensor(x)}
        args = {"splits": list(splits), "metrics": list(names), "describe": describe}
        if self.keeps_own():
            args["own_round"] = self.round_of(x)
        requests = self.write_requests("metrics", where, args, arrays)

        def check(i: int, reply: Reply) -> None:
            self.check_measured(i, splits, {*ALWAYS, *names}, reply)
            if describe:
                check_detail(self.members.hellos[i].sizes.get(splits[0], 0), reply)

        return self.mailbox.ask(requests, check, partial=True)

    # -- the verbs --------------------------------------------------------------------------------

    @override
    def losses(self, x: Vector, stream: Stream, batch_size: int | None = None) -> Losses:
        self.members.engine.refuse_minibatches(batch_size)
        arrays = {"x": pack_tensor(x)}
        requests = self.write_requests("losses", stream, {"batch_size": batch_size}, arrays)
        return self.read_numbers(self.ask(requests, self.check_loss), "loss")

    @override
    def value_and_gradient(
        self, x: Vector, stream: Stream, batch_size: int | None = None
    ) -> tuple[Losses, ClientVectors]:
        self.members.engine.refuse_minibatches(batch_size)
        args = {"batch_size": batch_size, "give": self.hidden is None}
        requests = self.write_requests("gradient", stream, args, {"x": pack_tensor(x)})

        def remake(lost: Messenger) -> None:
            lost.ask({i: requests[i] for i in lost.index.tolist()}, self.check_gradient)

        replies = self.ask(requests, self.check_gradient)
        self.keep_errors(x, replies)
        keys = [f"{request.tag}/gradient" for request in requests.values()]
        rows = self.read_rows(replies, "gradient") if self.hidden is None else None
        return self.read_numbers(replies, "loss"), FlowerVectors(self, keys, rows, remake, x=x)

    @override
    def local_steps(
        self,
        x: Vector,
        local: LocalSGD,
        stream: Stream,
        *,
        control: ClientVectors | None = None,
        target: Vector | None = None,
        slopes: Weights | None = None,
    ) -> Moved:
        # Where vectors are hidden the work is asked for together with the first sum of its result.
        work = local.work()
        self.members.engine.refuse_minibatches(work.batch_size)
        work.check(control, target, slopes)
        assert control is None or isinstance(control, FlowerVectors)
        given = {"x": x} if target is None else {"x": x, "target": target}
        arrays = {name: pack_tensor(vector) for name, vector in given.items()}
        arrays |= pack_metric(work.scale)
        args = {"work": work.to_dict(), "give": self.hidden is None, "control": None, "slope": None}
        requests = self.write_requests("local", stream, args, arrays)
        for k, (i, request) in enumerate(requests.items()):
            if control is not None:
                request.args["control"] = control.key_of(i)
            if slopes is not None:
                request.args["slope"] = float(slopes[k])
        return RequestedWork(self, requests, work, control, x, target).start()

    @override
    def remembered(self, vectors: ClientVectors | None, index: Index) -> ClientVectors:
        assert vectors is None or isinstance(vectors, KeyedMemory)
        keys = [""] * len(self.names) if vectors is None else list(vectors.keys)
        self.pins.update({i: key for i, key in enumerate(keys) if key})
        zero = torch.zeros(self.model.size, dtype=self.model.dtype, device=self.model.device)
        rows = [self._kept.get((i, keys[i])) if keys[i] else zero for i in index.tolist()]
        whole = [row for row in rows if row is not None]
        known = torch.stack(whole) if len(whole) == len(rows) and self.hidden is None else None
        return FlowerVectors(self.subset(index), [keys[i] for i in index.tolist()], known)

    @override
    def remember(
        self, memory: ClientVectors | None, index: Index, vectors: ClientVectors
    ) -> ClientVectors:
        assert memory is None or isinstance(memory, KeyedMemory)
        assert isinstance(vectors, FlowerVectors)
        vectors.settle()
        keys = [""] * len(self.names) if memory is None else list(memory.keys)
        if vectors.withheld:
            return KeyedMemory(tuple(keys))
        before = {(i, key) for i, key in enumerate(keys) if key}
        for k, i in enumerate(index.tolist()):
            keys[i] = vectors.key_of(i)
            if vectors.rows is not None:
                self._kept[i, keys[i]] = vectors.rows[k]
        wanted = before | set(enumerate(keys))
        for old in [key for key in self._kept if key not in wanted]:
            del self._kept[old]
        return KeyedMemory(tuple(keys))

    # -- what replies may hold --------------------------------------------------------------------

    def check_gradient(self, i: int, reply: Reply) -> None:
        """Refuse a loss or a gradient that cannot be used."""
        self.check_loss(i, reply)
        self.check_error(reply)
        if self.hidden is None:
            self.check_vector(reply, "gradient", "squared gradient norm")

    def check_measured(self, i: int, splits: Sequence[str], known: set[str], reply: Reply) -> None:
        """Refuse numbers of other splits, other sizes or other names than a client can have."""
        held, tables = self.members.hellos[i].sizes, reply.numbers.get("splits")
        if not isinstance(tables, dict) or set(tables) != set(held) & set(splits):
            raise WireError("sent metrics of splits that were not requested")
        for split, table in tables.items():
            if not isinstance(table, dict) or table.get("size") != held[split]:
                raise WireError(f"evaluated a number of {split} samples other than it announced")
            metrics = table.get("metrics")
            if not isinstance(metrics, dict) or not set(metrics) <= known:
                raise WireError("sent unknown metrics")
            if held[split] and "loss" not in metrics:
                raise WireError(f"sent no {split} loss")
            for name, value in metrics.items():
                self._check_metric(f"{split} {name}", name, value, held[split])

    def _check_metric(self, where: str, name: str, value: Any, samples: int) -> None:
        if not samples:
            if not (isinstance(value, float) and math.isnan(value)):
                raise WireError(f"{where} is a value measured on no samples")
            return
        fraction = find_metric(name).is_fraction
        least = 0.0 if fraction else self.least_loss if name == "loss" else -math.inf
        expect_number(where, value, self.dtype, least)
        if fraction and value > 1:
            raise WireError(f"{where} is {value}, and a fraction lies in [0, 1]")


def check_detail(size: int, reply: Reply) -> None:
    """Refuse details that are none, or of other samples than the client said it has."""
    told = reply.numbers.get("detail")
    if told is None and size == 0:
        return
    try:
        found = ClientDetail.from_dict(told)
    except ValueError as error:
        raise WireError(f"sent {error}") from error
    if found.size != size:
        raise WireError("described another number of samples than it said it has")


def read_evaluation(
    split: str, replies: dict[int, Reply], n: int, names: Iterable[str]
) -> Evaluation:
    """Return one split's numbers of all n clients; NaN for those that did not answer."""
    sizes = np.zeros(n, dtype=np.int64)
    found = {name: np.full(n, np.nan) for name in names}
    for i, reply in replies.items():
        table = reply.numbers["splits"].get(split)
        if table is not None:
            sizes[i] = table["size"]
            for name, value in table["metrics"].items():
                found[name][i] = value
    optional = set(ALWAYS) - {"loss"}
    seen = {k: v for k, v in found.items() if k not in optional or not np.isnan(v).all()}
    return Evaluation(split, sizes, seen)

"""One client at one request: the library's own local work on its data.

Every request is answered from the request, the data and the client's memory alone, and memory is
written at the end, so a request may be repeated at will.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equifed.contract.curvature import Inexactness
from equifed.contract.local import LocalWork, own_strength
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.engines.base import OwnRows
from equifed.engines.ordered_sums import DenseVectors
from equifed.flower.memory import Memory
from equifed.flower.questions import pack_blocks
from equifed.flower.results import digest, keep_delivery, slug
from equifed.flower.secure.masking import STEPS, Identity, Masking, Signer
from equifed.flower.site import Policy
from equifed.flower.statistics import describe_arrays
from equifed.flower.task import PACKAGES, OneClient, Schema, Task
from equifed.flower.wire import (
    ALWAYS,
    PARTS,
    Reply,
    Request,
    WireError,
    digest_model,
    expect_vector,
)
from equifed.metrics.metric import as_metrics
from equifed.models.curvature import known_curvature
from equifed.models.own_part import fit_new_client
from equifed.training.tables import package_versions


@dataclass
class Client:
    """One client: data, model and memory, its partition if it has one, its policy and keys.

    ``notes`` are what it tells the others about its data, ``results`` the folder for models.
    """

    federation: Federation
    task: Task
    root: Path
    partition: int | None = None
    policy: Policy = field(default_factory=Policy)
    identity: Identity = field(default_factory=Identity)
    notes: tuple[str, ...] = ()
    results: Path | None = None
    _engines: dict[int, OneClient] = field(default_factory=dict)

    def build_engine(self, position: int) -> OneClient:
        """Return the engine for a position in the federation."""
        if position not in self._engines:
            self._engines = {position: self.task.build_engine(self.federation, position)}
        return self._engines[position]


class Stale(Exception):
    """The request refers to something that this client does not hold."""


class Worker:
    """One client at one request."""

    def __init__(self, client: Client, request: Request) -> None:
        self.client, self.request, self.args = client, request, request.args
        self.federation, self.task = client.federation, client.task
        self.engine = client.build_engine(max(request.client, 0))
        self.memory = Memory(client.root, request.run, client.federation.names[0])
        self.round = int(self.args.get("round", 0))
        if request.op in ("losses", "gradient", "local", "metrics", "deliver"):
            ended = request.op in ("metrics", "deliver")  # a model, with the own part of its round
            before = int(self.args.get("own_round", 0)) + 1 if ended else self.round
            self._bind_own_part(before)

    def answer(self) -> Reply:
        """Do what the request says."""
        op = self.request.op  # one of those that ``wire`` lists
        if op in STEPS:
            reply = self.request.reply(self._masking().take_step(op))
        else:
            reply = getattr(self, op)()
        self.memory.tidy(self.round, [str(key) for key in self.args.get("pins", [])])
        return reply

    def hello(self) -> Reply:
        """Say who this is, what data there are, and with which software."""
        policy = self.client.policy
        policy.check_plan(self.args.get("plan", {}), len(self.federation.train))
        size, dtype = self._kind()
        policy.check_bytes("the model has", size * np.dtype(dtype).itemsize)
        return self.request.reply(
            {
                "name": self.federation.names[0],
                "partition": self.client.partition,
                "versions": package_versions(PACKAGES),
                "sizes": {k: len(split) for k, split in self.federation.splits().items()},
                "schema": Schema.of(self.federation).to_dict(),
                "model": self.task.fingerprint(self.engine),
                "notes": [*policy.describe(), *self.client.notes],
            }
        )

    def statistics(self) -> Reply:
        """Return rows, labels and means, as far as the site shows them."""
        self.client.policy.check_plan({}, len(self.federation.train))
        shown = self.client.policy.show_by_name
        return self.request.reply({"statistics": describe_arrays(self.federation, shown)})

    def losses(self) -> Reply:
        """Return f_i(x)."""
        losses = self.engine.losses(self._sent("x"), self._stream(), self.args["batch_size"])
        return self.request.reply({"loss": float(losses[0])})

    def gradient(self) -> Reply:
        """Return f_i(x), and keep the gradient or also send it."""
        losses, vectors = self.engine.value_and_gradient(
            self._sent("x"), self._stream(), self.args["batch_size"]
        )
        assert isinstance(vectors, DenseVectors)
        numbers: dict[str, Any] = {"loss": float(losses[0])}
        found = self.engine.inexactness(self._sent("x"))
        if isinstance(found, Inexactness):  # own parts that are found numerically
            numbers["own_error"] = [float(found.losses[0]), float(found.gradients[0])]
        return self._keep(numbers, {"gradient": vectors})

    def local(self) -> Reply:
        """Do local work, and keep or send what comes of it."""
        work = LocalWork.from_dict(self.args["work"])
        self.client.policy.check_work(work, len(self.federation.train))
        target, slope = None, self.args["slope"]
        control = self._control()
        if control is not None:
            target = self._sent("target")
        moved = self.engine.local_steps(
            self._sent("x"),
            work,
            self._stream(),
            control=control,
            target=target,
            slopes=None if slope is None else np.array([float(slope)]),
        )
        if self.engine.remembers_own():
            self.memory.keep_own(self.round, _array(self.engine.own_after()[0]))
        numbers: dict[str, Any] = {"steps": int(moved.steps[0])}
        if moved.thresholds is not None:
            numbers["threshold"] = float(moved.thresholds[0])
        parts = {name: getattr(moved, name) for name in PARTS if getattr(moved, name) is not None}
        return self._keep(numbers, parts)

    def sum(self) -> Reply:
        """Return a kept vector times this client's weight, masked."""
        key = str(self.args["key"])
        vector = self._recall(key)
        if "minus" in self.args:
            vector = vector - self._recall(str(self.args["minus"]))
        return self.request.reply(
            {}, {"masked": self._masking().mask(vector, *self.memory.trace(key))}
        )

    def curvature(self) -> Reply:
        """Return this client's second derivatives, or their product with a thin matrix, packed."""
        x, thin = self._sent("x"), None
        if "thin" in self.request.arrays:
            thin = self._tensor(np.asarray(self.request.arrays["thin"]))
        found = self.engine.curvature_sum(x, np.ones(1), self.args["form"], thin)
        if isinstance(found, str):
            raise WireError(found)
        packed = _array(pack_blocks(found.blocks, thin is not None).to(self.engine.model.dtype))
        if "mask" not in self.args:
            self.client.policy.allow_clear()
            return self.request.reply({}, {"curvature": packed})
        model = digest_model(np.asarray(self.request.arrays["x"]).tobytes())
        return self.request.reply({}, {"masked": self._masking().mask(packed, model, self.round)})

    def bounds(self) -> Reply:
        """Return what is certain of this client's curvature, as a simulation of all finds it."""
        model, clients = self.engine.model, int(self.args["clients"])
        known = known_curvature(model, clients, self.engine.inputs_of, [0])
        if isinstance(known, str) or not np.isfinite(known.smoothness[0]):
            return self.request.reply({})
        least, largest = float(known.strong_convexity[0]), float(known.smoothness[0])
        bounds = {"smoothness": largest, "strong_convexity": least, "tight": known.tight}
        return self.request.reply(bounds)

    def norms(self) -> Reply:
        """Return the squared length of a kept vector."""
        vectors = DenseVectors(self._tensor(self._recall(str(self.args["key"])))[None])
        scale = self._sent("scale") if "scale" in self.request.arrays else None
        return self.request.reply({"norm": float(vectors.squared_norms(scale)[0])})

    def recall(self) -> Reply:
        """Return a kept vector in clear."""
        self.client.policy.allow_clear()
        return self.request.reply({}, {"vector": self._recall(str(self.args["key"]))})

    def metrics(self) -> Reply:
        """Return the metrics of every split, and what single samples say if that is asked."""
        numbers, asked = {}, as_metrics(self.args["metrics"])
        x, splits = self._sent("x"), self.args["splits"]
        for found in self.engine.evaluate(x, splits, asked):
            metrics = {name: float(values[0]) for name, values in found.metrics.items()}
            kept = {k: v for k, v in metrics.items() if k in ALWAYS or not np.isnan(v)}
            numbers[found.split] = {"size": int(found.sizes[0]), "metrics": kept}
        if not self.args["describe"]:
            return self.request.reply({"splits": numbers})
        told = self.engine.describe(x, splits[0], asked)
        own = None if told is None or told.clients[0] is None else told.clients[0].to_dict()
        return self.request.reply({"splits": numbers, "detail": own})

    def deliver(self) -> Reply:
        """Keep the model of a run that ended, with its card and this client's page."""
        x = self._sent("x")
        if digest(_array(x)) != self.args["sha256"]:
            raise WireError("the model was changed on its way")
        folder = self.client.results or self.client.root / "results" / slug(
            self.federation.names[0]
        )
        predictor = self.engine.predictor(x)
        if predictor.own:  # this site's model: with the own part that it has
            predictor = predictor.for_client(self.federation.names[0])
        checksum = keep_delivery(folder, self.request.run, predictor, self.args)
        return self.request.reply({"checksum": checksum})

    # -- small parts ------------------------------------------------------------------------------

    def _bind_own_part(self, before: int) -> None:
        """Let the engine start from the own part of the last round before another one.

        A site that comes after the end has none, and no run to draw one for: it fits its own.
        """
        engine = self.engine
        if not engine.remembers_own():
            return
        kept = self.memory.own_before(before)
        if kept is None and "start" not in self.args:
            row = self._fit_own_part()[None]
        elif kept is None or kept.shape != (engine.model.own_size,):
            seed, *address = self.args["start"]
            engine.initial(Stream(int(seed), tuple(address)))  # draws the own part, too
            row = engine.own_rows.start
        else:
            row = engine.own_rows.start.new_tensor(kept)[None]
        engine.own_rows = OwnRows(row)

    def _fit_own_part(self) -> torch.Tensor:
        """Return the best own part (p,) for the site's training samples at the shared part x."""
        x, train = self._sent("x"), self.federation.train
        told, names = self.engine.predictor(x), tuple(self.engine.model.own_shapes)
        try:
            module = fit_new_client(
                told.module,
                names,
                lambda m: torch.as_tensor(told.run_module(m, train.inputs)),
                torch.as_tensor(train.targets),
                told.loss,
                own_strength(told.own_l2, len(train.targets)),
            )
        except ValueError as error:  # our own words, about parameters and settings
            raise WireError(f"no own part can be fitted here: {error}") from error
        return torch.cat([module.get_parameter(n).detach().reshape(-1) for n in names]).to(x)

    def _keep(self, numbers: dict[str, Any], parts: Mapping[str, DenseVectors]) -> Reply:
        """Keep vectors under their keys; send them, or one of them scaled and masked, if asked."""
        shorten = self.client.policy.shorten
        rows = {name: shorten(_array(vectors.matrix[0])) for name, vectors in parts.items()}
        model = digest_model(np.asarray(self.request.arrays["x"]).tobytes())
        for name, row in rows.items():
            self.memory.put(f"{self.request.tag}/{name}", row, self.round, model)
        if self.args["give"]:
            self.client.policy.allow_clear()
            return self.request.reply(numbers, rows)
        if "mask" in self.args:
            part = rows[str(self.args["mask"]["part"])]
            masked = self._masking().mask(part, model, self.round)
            return self.request.reply(numbers, {"masked": masked})
        return self.request.reply(numbers)

    def _control(self) -> DenseVectors | None:
        key = self.args["control"]
        if "control" in self.request.arrays:
            return DenseVectors(self._sent("control")[None])
        return None if key is None else DenseVectors(self._tensor(self._recall(str(key)))[None])

    def _recall(self, key: str) -> NDArray[Any]:
        size, dtype = self._kind()
        if not key:  # the memory that every client starts with
            return np.zeros(size, dtype=dtype)
        vector = self.memory.get(key)
        if vector is None or vector.shape != (size,) or vector.dtype.name != dtype:
            raise Stale(f"this client does not hold {key}")
        return vector

    def _masking(self) -> Masking:
        who = Signer(self.client.identity, self.request.run, self.federation.names[0])
        return Masking(self.memory, self.args["mask"], self.request.client, who)

    def _sent(self, name: str) -> torch.Tensor:
        return self._tensor(expect_vector(self.request.arrays, name, *self._kind()))

    def _stream(self) -> Stream:
        return Stream(int(self.args["seed"]), tuple(self.args["address"]))

    def _kind(self) -> tuple[int, str]:
        return self.engine.model.size, self.task.dtype

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(array.copy(), device=self.engine.model.device)


def _array(vector: torch.Tensor) -> NDArray[Any]:
    out: NDArray[Any] = vector.detach().to("cpu").contiguous().numpy()
    return out

"""The model and loss that server and clients build alike, and what a client says of its data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import nn
from typing_extensions import override

from equifed.contract.local import OwnL2, OwnSteps
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.fields import Layout, Packed, compare_layouts
from equifed.data.split import DataError
from equifed.engines.loop import LoopClients
from equifed.engines.minibatches import Minibatches
from equifed.models import architectures
from equifed.models.flat import Penalise
from equifed.models.losses import loss_by_name, outputs_for, resolve_loss, weigh_classes
from equifed.privacy.clients import PrivateClients
from equifed.privacy.ledger import Bounds

PACKAGES = ("equifed", "flwr", "torch", "numpy")
"""Whose versions server and clients compare."""

LARGEST_SAMPLE = 1 << 26
"""Numbers in one sample that a client can say it has; the server makes two to build the model."""

LARGEST_NAMES = 200_000
"""Characters of all names of features that a client tells."""

Built = TypeVar("Built", bound=LoopClients)

ModelBuilder = Callable[[tuple[int, ...], int], nn.Module]
"""Maps the shape of one sample and the number of outputs to a module."""


@dataclass(frozen=True)
class Schema:
    """The kind of a client's data: all clients must have the same."""

    input_shape: tuple[int, ...]
    input_dtype: str
    target_shape: tuple[int, ...]
    target_dtype: str
    classes: int | None
    digest: str = ""
    """Of names, order, categories and preparation, where the data come with them."""
    names: tuple[str, ...] = ()
    """Names of the features, where the data come with them and there are not too many."""
    class_names: tuple[str, ...] = ()
    layout: Layout | None = None
    """The arrays of a sample, where it consists of several."""

    @classmethod
    def of(cls, federation: Federation) -> Schema:
        """Describe the data of a federation."""
        inputs, targets = federation.train.inputs, federation.train.targets
        prepared = federation.preparation
        return cls(
            tuple(federation.input_shape),
            inputs.dtype.name,
            tuple(targets.shape[1:]),
            targets.dtype.name,
            federation.classes,
            "" if prepared is None else prepared.digest(),
            () if prepared is None else shorten_names(prepared.feature_names),
            shorten_names(federation.class_names),
            federation.layout,
        )

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schema:
        """Read what :meth:`to_dict` wrote; raise if it is anything else."""
        shapes = [tuple(int(n) for n in values[key]) for key in ("input_shape", "target_shape")]
        kinds = [str(np.dtype(values[key]).name) for key in ("input_dtype", "target_dtype")]
        known = {"float32", "float64", "int64"}
        if not set(kinds) <= known or min(sum(shapes, ()), default=1) < 1 or len(shapes[0]) > 6:
            raise ValueError("no schema of data")
        if max(map(math.prod, shapes)) > LARGEST_SAMPLE:
            raise ValueError("no sample is as large")
        classes = values["classes"]
        digest = str(values.get("digest", ""))[:128]
        known_classes = None if classes is None else int(classes)
        titles = [tuple(str(t) for t in values.get(k, ())) for k in ("names", "class_names")]
        layout = Layout.from_json(values.get("layout"))
        if layout is not None:
            arrays, whole = layout.fields, kinds[0] == "int64"
            few = shorten_names([f.name for f in arrays]) and max(len(f.shape) for f in arrays) < 6
            if (layout.width,) != shapes[0] or layout.whole != whole or not few:
                raise ValueError("no arrays of such a row")
        kind = shapes[0], kinds[0], shapes[1], kinds[1], known_classes, digest
        return cls(*kind, titles[0], titles[1], layout)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    def compare_samples(self, other: Schema, name: str, other_name: str) -> str:
        """Say in which arrays another client's samples differ; nothing if they do not."""
        try:
            here, there = f"{other_name}: a sample", f"{name}: a sample"
            compare_layouts(self.layout, other.layout, here, there)
        except DataError as error:
            return str(error)
        return ""

    def make_placeholder(self) -> Federation:
        """Return two samples of zeros of this kind, enough to build the model on the server."""
        x: Any = np.zeros((2, *self.input_shape), dtype=self.input_dtype)
        x = x if self.layout is None else Packed(x, self.layout)
        y = np.zeros((2, *self.target_shape), dtype=self.target_dtype)
        tokens = self.input_dtype == "int64"
        return Federation.from_clients({"schema": (x, y)}, classes=self.classes, tokens=tokens)


def shorten_names(names: Sequence[str]) -> tuple[str, ...]:
    """Return names that fit into a message; none if they are too many, their digest remains."""
    return tuple(names) if sum(map(len, names)) + 8 * len(names) < LARGEST_NAMES else ()


@dataclass(frozen=True)
class Task:
    """Model, loss and precision; the rest is as for :func:`equifed.simulate`.

    ``model`` builds the module from the shape of one sample and the number of outputs, ``loss`` is
    a name or ``package.module:function``, ``class_weights`` are by the number of the class.
    """

    model: ModelBuilder
    loss: str
    l2: float = 0.0
    dtype: Literal["float32", "float64"] = "float32"
    init: Literal["fresh", "given"] = "fresh"  # whether the server draws the first model
    penalise: Penalise = "all"
    class_weights: str | Mapping[str, float] | None = None
    own: str | Sequence[str] | None = None
    own_l2: OwnL2 | None = None
    own_steps: OwnSteps = "auto"
    about: str = ""  # the app's settings (JSON), which a plan must have, too
    samples: Layout | None = None  # the agreed arrays of a sample, where there are several

    def __post_init__(self) -> None:
        if isinstance(self.class_weights, str):
            raise ValueError(
                "model.class_weights: no client knows how frequent the classes are in all of them; "
                "on Flower give a table of weights by the number of the class, { 0 = 1.0, 1 = 5.0 }"
            )

    def build_engine(self, federation: Federation, position: int = 0) -> OneClient:
        """Return the engine of one client, with the randomness of its position."""
        return self._build(OneClient, federation, at=position)

    def build_private(self, federation: Federation, privacy: Bounds) -> PrivateClients:
        """Return the engine of one client whose answers carry noise."""
        return self._build(PrivateClients, federation, privacy=privacy)

    def _build(self, kind: Callable[..., Built], federation: Federation, **more: Any) -> Built:
        module = self.model(tuple(federation.input_shape), outputs_for(federation, self.loss))
        dtype = getattr(torch, self.dtype)
        given: dict[str, Any] = {"l2": self.l2, "penalise": self.penalise, "dtype": dtype}
        if self.own is not None:
            given |= {"own": self.own, "own_l2": self.own_l2, "own_steps": self.own_steps}
        loss: Any = self.loss
        if self.class_weights is not None:
            base = loss_by_name(resolve_loss(self.loss, federation.classes))
            loss = weigh_classes(base, self.class_weights, federation)
        return kind(federation, module, loss, **given, init=self.init, **more)

    def fingerprint(self, engine: OneClient) -> str:
        """Return a digest of everything about the model that both sides must share."""
        shapes = {name: list(shape) for name, shape in engine.model.shapes.items()}
        shared: list[Any] = [shapes, self.loss, self.l2, self.penalise, self.dtype]
        if isinstance(self.class_weights, Mapping):
            shared.append(dict(self.class_weights))
        if engine.own is not None:
            shared.append([*engine.own.names, engine.own.steps, engine.own.l2])
        told = json.dumps(shared, sort_keys=True)
        told += engine.model.digest_fixed()  # it is not sent, so it must be there already
        return hashlib.sha256(told.encode()).hexdigest()


@dataclass(frozen=True)
class Candidate:
    """A linear model of a fit, as requests name it; ``whole``: on validation rows, too."""

    l2: float
    own_l2: float | None
    whole: bool = False

    def task(self, base: Task, data: Federation) -> Task:
        """Return model, loss and precision, as :func:`equifed.fit` has them for such data."""
        from equifed.runs.candidates import model_for

        name, loss = model_for(data)
        own: dict[str, Any] = {"own": None if self.own_l2 is None else "bias", "own_steps": "auto"}
        return replace(
            base, model=partial(architectures.build, name), loss=loss, l2=self.l2, init="fresh",
            dtype="float64", penalise="all", class_weights=None, own_l2=self.own_l2, **own,
        )  # fmt: skip

    def rows(self, data: Federation) -> Federation:
        """Return the rows that it is solved on."""
        from equifed.runs.candidates import pool

        return pool(data) if self.whole else data


class OneClient(LoopClients):
    """The reference engine on one client's data, drawing the numbers of its true position."""

    def __init__(self, *args: Any, at: int, **options: Any) -> None:
        super().__init__(*args, **options)
        self._at = at

    @override
    def _batches(self, k: int, stream: Stream, batch_size: int | None) -> Minibatches:
        client = torch.tensor([self._at], device=self.model.device)
        size = torch.tensor([int(self.sizes[k])], device=self.model.device)
        dropout = bool(self.model.dropouts)
        return Minibatches(stream, client, size, batch_size, self.model.dtype, dropout)

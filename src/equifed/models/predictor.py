"""A trained model as people use it: rows of a table in, classes or values out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from equifed.contract.local import OwnL2, own_strength
from equifed.data.columns import Columns, clean_column, group_rows, read_columns
from equifed.data.federation import Federation
from equifed.data.fields import Layout, is_frame
from equifed.data.preparation import Preparation
from equifed.data.split import DataError, Split, refuse
from equifed.models.adapted import take_logits
from equifed.models.losses import FittedLoss, base_loss, fitted_loss
from equifed.models.own_part import OwnParameters, check_own, fit_new_client, put_own

Array: TypeAlias = NDArray[Any]
Link: TypeAlias = Literal["softmax", "sigmoid"] | None

# What makes probabilities of a module's outputs, by the loss that it was trained with
LINKS: dict[str | None, Link] = {"cross_entropy": "softmax", "binary_logistic": "sigmoid"}
BLOCK = 4096  # rows per forward pass


def link_of(loss: Any) -> Link:
    """Return what makes probabilities of the outputs; None where the loss promises none."""
    return LINKS.get(fitted_loss(base_loss(loss)))


@dataclass(frozen=True, eq=False)
class Predictor:
    """Predicts for new rows, which it prepares as the training rows were.

    Rows come as a data frame, a mapping of columns or the path of a CSV or Parquet file, matched by
    name; or as an array of what the model was trained on: :attr:`columns` in order and unscaled
    where a table was prepared, else samples of ``input_shape``.

    Parameters
    ----------
    module, input_shape
        With its weights, in evaluation mode; the shape of one prepared sample.
    classes : tuple of str, optional
        Names of the classes; None for a regression.
    link : {"softmax", "sigmoid", None}
        What makes probabilities of the outputs.
    preparation : Preparation, optional
        How a table becomes features.
    clients : tuple of str
        Who took part in training.
    tokens, outputs_shape
        Samples are indices, not numbers; one sample's values, in a regression, () for one.
    own : mapping of parameter name to tensor
        Own parameters, a row for each of ``clients``. Rows of others are predicted with the module
        as it is, which holds the mean, and a warning.
    only : str, optional
        The module has the own part of this client: rows of others are refused.
    loss, own_l2
        What own parts can be fitted to: the loss of training, and the strength of its penalty.
    layout : Layout, optional
        The arrays of a sample, where there are several: rows come as a mapping or tuple of arrays.

    Examples
    --------
    >>> import equifed as ef
    >>> table = {"site": ["n", "n", "s", "s"], "dose": [0, 1, 0, 1], "ill": ["no", "yes"] * 2}
    >>> data = ef.Federation.from_table(table, client="site", target="ill")
    >>> predictor = ef.train(ef.FedAvg(), ef.simulate(data, "logistic"), rounds=20).predictor()
    >>> predictor.predict({"dose": [0, 1]}).tolist()
    ['no', 'yes']
    """

    module: nn.Module
    input_shape: tuple[int, ...]
    classes: tuple[str, ...] | None = None
    link: Link = None
    preparation: Preparation | None = None
    clients: tuple[str, ...] = ()
    tokens: bool = False
    outputs_shape: tuple[int, ...] = ()
    own: OwnParameters = field(default_factory=dict)
    only: str | None = None
    loss: FittedLoss | None = None
    own_l2: OwnL2 = 0.0
    layout: Layout | None = None

    def __post_init__(self) -> None:
        check_own(self.module, self.own, self.clients)

    def __repr__(self) -> str:
        what = "values" if self.classes is None else f"classes {', '.join(self.classes[:6])}"
        shape = f"{' x '.join(map(str, self.input_shape))} features"
        return f"<Predictor of {what} from {self.layout or shape}>"

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Columns that a table needs; None where the model was trained on arrays."""
        held = self.preparation
        return None if held is None else tuple(column.name for column in held.columns)

    @property
    def feature_names(self) -> tuple[str, ...] | None:
        """Names of the prepared features, in order; None where arrays had none."""
        return None if self.preparation is None else self.preparation.feature_names

    def predict(self, rows: Any, client: str | Sequence[str] | None = None) -> Array:
        """Return the class name, or the value, of every row.

        ``client`` says whose rows they are, of all or one by one, where clients have own parts or
        scales of their own; by default the table's client column does.
        """
        if self.classes is None:
            values = self.in_units(self._outputs(rows, client))
            return values.reshape(len(values), *self.outputs_shape)
        return self.name_likeliest(self.decision_function(rows, client))

    def name_likeliest(self, scores: Array) -> Array:
        """Return the class with the highest score in every row of :meth:`decision_function`."""
        return np.asarray(np.asarray(self.classes)[most_likely(scores)])

    def in_units(self, outputs: Array) -> Array:
        """Return a regression's outputs, or encoded targets, in the unit of the target column."""
        prepared = self.preparation
        return outputs if prepared is None else np.asarray(prepared.target.decode(outputs))

    def predict_proba(self, rows: Any, client: str | Sequence[str] | None = None) -> Array:
        """Return the probability of every class, shape (rows, classes)."""
        if self.link is None and self.classes is not None:
            raise ValueError(
                "The loss that the model was trained with gives scores, not probabilities; train "
                "with cross_entropy or logistic, or use decision_function."
            )
        return self.to_chances(self.decision_function(rows, client))

    def to_chances(self, given: Array) -> Array:
        """Return the probabilities that belong to scores of :meth:`decision_function`."""
        scores = torch.as_tensor(given)
        if scores.dim() == 1:
            return torch.stack([torch.sigmoid(-scores), torch.sigmoid(scores)], dim=1).numpy()
        return torch.softmax(scores, dim=1).numpy()

    def decision_function(self, rows: Any, client: str | Sequence[str] | None = None) -> Array:
        """Return scores: of the second of two classes (rows,), else of every class."""
        if self.classes is None:
            raise ValueError("A regression has no classes to score; use predict.")
        return self._score(self._outputs(rows, client))

    def _score(self, outputs: Array) -> Array:
        """Return scores of all classes, if there are as many as the module tells apart."""
        told, known = max(2, outputs.shape[1]), len(self.classes or ())
        if told != max(2, known):
            raise ValueError(f"The model tells {told} classes apart, but {known} are named.")
        return class_scores(outputs)

    def features(self, rows: Any, client: str | Sequence[str] | None = None) -> Array:
        """Return the rows as the module sees them, or say what is wrong with them."""
        rows, prepared, wanted = self._read(rows), self.preparation, self.columns or ()
        if prepared is None:
            if isinstance(rows, Columns):
                raise DataError(
                    "The model was trained on arrays, whose columns have no names; give an array "
                    f"of shape (rows, {', '.join(map(str, self.input_shape))})."
                )
            return _check_array(rows, self.input_shape)
        if not isinstance(rows, Columns):
            if rows.ndim != 2 or rows.shape[1] != len(wanted):
                raise DataError(
                    f"The model takes rows of {len(wanted)} columns ({', '.join(wanted[:12])}), "
                    f"got an array of shape {rows.shape}; give these columns, in this order."
                )
            rows = read_columns({name: rows[:, k].tolist() for k, name in enumerate(wanted)})
        if client is None or isinstance(client, str):
            return prepared.apply(rows, client)
        if prepared.client is not None:
            rows = Columns({**rows, prepared.client: clean_column(list(client))})
        return prepared.apply(rows)

    def _read(self, rows: Any) -> Columns | Array:
        """Return rows of one array each, the columns of a table, or an array; cells once."""
        layout, named = self.layout, isinstance(rows, Mapping) or hasattr(rows, "column_names")
        if layout is None or (isinstance(rows, np.ndarray) and rows.shape[1:] == (layout.width,)):
            table = named or isinstance(rows, str) or hasattr(rows, "__fspath__") or is_frame(rows)
            return read_columns(rows) if table else np.asarray(rows)
        if layout.named and named:
            held = list(rows if isinstance(rows, Mapping) else rows.column_names)
            rows = {one.name: rows[one.name] for one in layout.fields if one.name in held}
        return layout.pack(rows)

    def answer(self, features: Array) -> Array:
        """Return the module's outputs for samples that are prepared already, (rows, outputs)."""
        return self.run_module(self.module, features)

    def for_client(self, client: str) -> Predictor:
        """Return what predicts for one client alone: its own part is in the module."""
        if not self.own:
            raise ValueError("The model has no own parts, it is the same for every client.")
        return replace(self, module=self.module_for(client), clients=(client,), own={}, only=client)

    def module_for(self, client: str) -> nn.Module:
        """Return the module with a client's own part, where there is one."""
        if not self.own:
            return self.module
        if client not in self.clients:
            known = ", ".join(self.clients[:12])
            raise DataError(f"There is no client {client!r}; there are {known}.")
        place = self.clients.index(client)
        return put_own(self.module, {name: rows[place] for name, rows in self.own.items()})

    def for_new_client(
        self, rows: Any = None, targets: Any = None, client: str = "new client",
        own_l2: OwnL2 | None = None,
    ) -> Predictor:  # fmt: skip
        """Return what predicts for a client that took no part in training.

        With labelled rows (targets of a table may be among its columns) it fits the client's own
        part at the shared parameters, as training would have; without, it takes the mean of the
        clients' own parts. ``own_l2`` is the strength of the penalty, by default that of training;
        ``"3/n"`` is 3 divided by the number of rows.
        """
        if self.only is not None:
            raise ValueError(
                f"This is the model of {self.only!r}, with its own part, as it was exported; take "
                "the predictor of the run. In a federation a site that comes after the end gets "
                'its own by: equifed flower run with do="evaluate"'
            )
        if not self.own:
            raise ValueError("The model has no own parts, it is the same for new clients, too.")
        if client in self.clients:
            raise ValueError(f"{client!r} took part in training; use for_client({client!r}).")
        mean = replace(self, clients=(client,), own={}, only=client)
        if rows is None and targets is None:
            return mean
        rows = self._read(rows)
        targets = self._find_targets(rows) if targets is None else targets
        mean._find_owners(rows, None, len(targets))  # refuses rows of others
        features, truth = mean.features(rows, client), torch.as_tensor(self.encode_targets(targets))
        if len(truth) != len(features) or not len(truth):
            raise DataError(
                f"Client {client!r}: {len(features)} rows and {len(truth)} targets; give as many "
                "of both, at least one."
            )

        def run(module: nn.Module) -> torch.Tensor:
            return torch.as_tensor(self.run_module(module, features))

        penalty = own_strength(self.own_l2 if own_l2 is None else own_l2, len(truth))
        module = fit_new_client(self.module, tuple(self.own), run, truth, self.loss, penalty)
        return replace(mean, module=module)

    def _find_targets(self, rows: Columns | Array) -> Sequence[Any]:
        """Return the column of a table that holds the targets."""
        if not isinstance(rows, Columns) or self.preparation is None:
            raise ValueError("Give rows and targets, to fit an own part, or neither.")
        target = self.preparation.target.name
        if target not in rows:
            raise DataError(
                f"The table has no column {target!r}, the target, which an own part is fitted to; "
                f"it has {', '.join(list(rows)[:20])}."
            )
        return rows[target]

    def encode_targets(self, targets: Sequence[Any] | Array) -> Array:
        """Return class numbers of class names, or values of a regression, scaled as in training."""
        if self.preparation is not None:
            return self.preparation.encode_target(targets)
        if self.classes is None:
            return np.asarray(targets, dtype=np.float64)
        code = {name: k for k, name in enumerate(self.classes)}
        refuse(
            (str(t) for t in targets if str(t) not in code),
            lambda t: f"There is no class {t!r}; there are {', '.join(list(code)[:12])}.",
        )
        return np.array([code[str(t)] for t in targets], dtype=np.int64)

    def _outputs(self, rows: Any, client: str | Sequence[str] | None) -> Array:
        """Return the module's outputs in float64, shape (rows, outputs)."""
        rows = self._read(rows)
        features = self.features(rows, client)
        owners = self._find_owners(rows, client, len(features)) if self.own or self.only else None
        return self.answer_owners(features, owners)

    def answer_owners(self, features: Array, owners: Sequence[str] | None) -> Array:
        """Return the outputs for prepared samples, each by its owner's module."""
        if not self.own or not owners:
            if self.own and owners is None:
                _say_shared(self.own, "and it is not said whose rows these are (client=NAME)")
            return self.answer(features)
        groups = group_rows(owners)
        warn_of_strangers(self.own, [name for name in groups if name not in self.clients])
        parts = []
        for name, mine in groups.items():
            module = self.module_for(name) if name in self.clients else self.module
            parts.append(self.run_module(module, features[mine]))
        return np.concatenate(parts)[np.argsort(np.concatenate(list(groups.values())))]

    def compare_split(self, split: Split, names: Sequence[str]) -> tuple[Array, Array, Array]:
        """Return owner, target and prediction of every sample of a split, in the target's unit."""
        owners = np.repeat(np.asarray(names), split.sizes)
        outputs = self.answer_owners(split.inputs, owners.tolist())
        if self.classes is None:
            targets = self.in_units(split.targets)
            return owners, targets, self.in_units(outputs).reshape(targets.shape)
        known = np.asarray(self.classes)
        return owners, known[split.targets], self.name_likeliest(self._score(outputs))

    def run_module(self, module: nn.Module, features: Array) -> Array:
        """Return the outputs of a module for prepared rows in float64, shape (rows, outputs)."""
        kind = torch.int64 if self.tokens else find_dtype(module)
        parts = []
        for start in range(0, len(features), BLOCK):
            block = torch.tensor(features[start : start + BLOCK], dtype=kind)
            with torch.no_grad():
                parts.append(take_logits(module(block)).reshape(len(block), -1).double())
        return torch.cat(parts).numpy() if parts else np.empty((0, 1))

    def _find_owners(
        self, rows: Any, client: str | Sequence[str] | None, count: int
    ) -> list[str] | None:
        """Return the client of every row; None where nobody says it."""
        title = None if self.preparation is None else self.preparation.client
        if client is None and title is not None and isinstance(rows, Columns):
            client = rows.get(title)
        if client is None:
            return None
        owners = [client] * count if isinstance(client, str) else list(map(str, client))
        if len(owners) != count:
            raise DataError(f"client names {len(owners)} rows, there are {count}.")
        refuse(
            (name for name in owners if self.only not in (None, name)),
            lambda name: (
                f"This is the model of {self.only!r}, with its own part; got a row of {name!r}: "
                "take that client's model, or the predictor of the run."
            ),
        )
        return owners


def class_scores(outputs: Array) -> Array:
    """Return scores: of the second of two classes (rows,), else of every class."""
    if outputs.shape[1] > 2:
        return outputs
    return outputs[:, 0] if outputs.shape[1] == 1 else outputs[:, 1] - outputs[:, 0]


def most_likely(scores: Array) -> Array:
    """Return the number of the class with the highest score."""
    return (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)


def _check_array(values: Array, shape: tuple[int, ...]) -> Array:
    """Return samples of this shape, all finite, or say what is wrong with them."""
    if values.dtype.kind not in "biuf":
        raise DataError(f"Samples must be numbers, got an array of {values.dtype}.")
    if values.shape[1:] != shape or values.ndim == 0:
        raise DataError(
            f"The model takes samples of shape {shape}, got an array of shape {values.shape}: "
            "one row per sample."
        )
    bad = np.argwhere(~np.isfinite(values.astype(np.float64)))
    if len(bad):
        place = ", ".join(str(int(k)) for k in bad[0])
        raise DataError(f"The array has a value that is not finite at [{place}]; fill it in.")
    return values


def find_dtype(module: nn.Module) -> torch.dtype:
    """Return the precision of a module's parameters."""
    return next(module.parameters(), torch.zeros(())).dtype


def name_classes(classes: int | None, names: Sequence[str]) -> tuple[str, ...] | None:
    """Return the names or numbers of classes; None for a regression."""
    return None if classes is None else tuple(names) or tuple(map(str, range(classes)))


def describe_predictor(data: Federation, module: nn.Module, loss: Any) -> Predictor:
    """Return what predicts with a module that was trained on these data."""
    return Predictor(
        module,
        input_shape=data.input_shape,
        classes=name_classes(data.classes, data.class_names),
        link=link_of(loss),
        preparation=data.preparation,
        clients=data.names,
        tokens=data.train.inputs.dtype.kind == "i",
        outputs_shape=data.train.targets.shape[1:],
        loss=fitted_loss(loss),
        layout=data.layout,
    )


def warn_of_strangers(own: OwnParameters, strangers: Sequence[str]) -> None:
    """Say which clients have no own part, if there are any."""
    if strangers:
        more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        names = ", ".join(map(repr, strangers[:5]))
        _say_shared(own, f"but {names}{more} took no part in training")


def _say_shared(own: OwnParameters, why: str) -> None:
    warnings.warn(
        f"Clients have own parts ({', '.join(own)}), {why}: the shared model is used, with the "
        "mean of own parts that were trained.",
        UserWarning,
        stacklevel=2,
    )

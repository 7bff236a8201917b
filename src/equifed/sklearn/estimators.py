"""The two estimators, what they share, and rows by client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from equifed.contract.algorithm import AnyAlgorithm
from equifed.data.columns import name_key, name_values
from equifed.data.federation import Federation
from equifed.data.split import Split
from equifed.engines.simulate import Simulated, simulate
from equifed.models.curvature import linear_layer
from equifed.models.losses import squared
from equifed.models.newton import fitted_loss
from equifed.models.predictor import Predictor, group_by_module, link_of
from equifed.objectives.base import SaddleObjective
from equifed.sklearn.solving import (
    Array,
    Newton,
    SampleWeighted,
    StopAtDecrement,
    build_algorithm,
    build_module,
    check_parameters,
    choose_scores,
    warn_if_unfinished,
)
from equifed.training.final_model import StopWhen
from equifed.training.loop import train


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples sorted by client.

    Parameters
    ----------
    names : tuple of str
        The clients' names, in order of appearance.
    clients : array
        The clients as they were given.
    inputs, targets : array
        The rows, one client's after the other's.
    counts : array of int
        Rows of each client.
    weights : array, optional
        What each row counts, all above zero; None: one.
    """

    names: tuple[str, ...]
    clients: Array
    inputs: Array
    targets: Array
    counts: Array
    weights: Array | None

    @classmethod
    def sort(cls, X: Array, y: Array, clients: ArrayLike | None, weights: Array | None) -> Rows:
        """Sort rows by client; those that count nothing are left out."""
        owners = _check_clients(clients, X)
        names = name_values(owners, "clients")
        known = list(names)
        place = np.array([known.index(name_key(owner)) for owner in owners], dtype=np.int64)
        order = np.argsort(place, kind="stable")
        if weights is not None:
            order = order[weights[order] > 0]
        counts = np.bincount(place[order], minlength=len(known))
        if not counts.all():
            who = list(names.values())[int(np.flatnonzero(counts == 0)[0])]
            raise ValueError(
                f"sample_weight: client {who!r} has no row that counts more than zero; leave its "
                "rows out."
            )
        first = [int(np.argmax(place == k)) for k in range(len(known))]
        chosen = None if weights is None else weights[order]
        return cls(tuple(names.values()), owners[first], X[order], y[order], counts, chosen)

    @property
    def sizes(self) -> Array:
        """Return what the rows of each client count together."""
        if self.weights is None:
            return self.counts
        return np.add.reduceat(self.weights, np.cumsum(self.counts) - self.counts)

    def split(self) -> Split:
        """Return the rows as a federation has them; weights are a last column of the targets.

        They are scaled so that a client's plain mean of weighted losses is its weighted mean.
        """
        offsets = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)
        if self.weights is None:
            return Split(self.inputs, self.targets, offsets)
        share = self.weights * np.repeat(self.counts / self.sizes, self.counts)
        values = self.targets.reshape(len(self.targets), -1).astype(np.float64)
        return Split(self.inputs, np.concatenate([values, share[:, None]], axis=1), offsets)


def check_own(own: Any, clients: ArrayLike | None, weights: Array | None) -> None:
    """Refuse own parts of nobody, and of rows that count differently."""
    if own is not None and clients is None:
        raise ValueError(
            f"own={own!r} is about parameters that every client keeps: say whose rows they are, "
            "fit(X, y, clients=...), or leave own out."
        )
    if own is not None and weights is not None:
        raise ValueError(
            f"own={own!r} and sample_weight do not go together; leave one of them out."
        )


def check_weights(sample_weight: ArrayLike | None, X: Array) -> Array | None:
    """Return what each row counts; None if all count the same."""
    if sample_weight is None:
        return None
    weights = np.asarray(_check_sample_weight(sample_weight, X, dtype=np.float64))
    if weights.min() < 0 or not weights.max() > 0:
        raise ValueError(
            "sample_weight must not be negative and not zero everywhere, got a smallest of "
            f"{weights.min():g} and a largest of {weights.max():g}."
        )
    return None if (weights == weights[0]).all() else weights


def _check_clients(clients: ArrayLike | None, X: Array) -> Array:
    """Return the client of every row as objects."""
    if clients is None:
        return np.full(len(X), "all", dtype=object)
    check_consistent_length(X, clients)
    owners = np.empty(len(X), dtype=object)
    owners[:] = list(np.asarray(clients, dtype=object).tolist())
    bad = [k for k, owner in enumerate(owners) if owner is None or owner != owner]
    if bad:
        raise ValueError(
            f"clients: row {bad[0]} has no client ({owners[bad[0]]!r}), nor have "
            f"{len(bad) - 1} others; every row needs one."
        )
    return owners


class FairEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators share; see :class:`FairClassifier` for the parameters."""

    def __init__(
        self,
        *,
        objective: str | Mapping[str, Any] | SaddleObjective = "average",
        algorithm: str | Mapping[str, Any] | AnyAlgorithm = "auto",
        model: str | nn.Module = "linear",
        l2: float = 1e-3,
        fit_intercept: bool = True,
        rounds: int = 200,
        tol: float = 1e-10,
        random_state: int | np.random.RandomState | None = 0,
        own: str | Sequence[str] | None = None,
        own_l2: float | None = None,
    ) -> None:
        self.own = own
        self.own_l2 = own_l2
        self.objective = objective
        self.algorithm = algorithm
        self.model = model
        self.l2 = l2
        self.fit_intercept = fit_intercept
        self.rounds = rounds
        self.tol = tol
        self.random_state = random_state

    def _train(self, rows: Rows, loss: Any, outputs: int, classes: int | None) -> None:
        """Train on checked rows and set the fitted attributes."""
        check_parameters(self.l2, self.rounds, self.tol)
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        weighted = rows.weights is not None
        data = Federation("fit", rows.names, rows.split(), classes=None if weighted else classes)
        module = build_module(self.model, rows.inputs.shape[1], outputs, self.fit_intercept)
        engine = simulate(
            data,
            module,
            SampleWeighted(loss, classes is not None) if weighted else loss,
            l2=self.l2,
            penalise="weights",
            dtype=torch.float64,
            init="fresh" if isinstance(self.model, str) else "given",
            own=self.own,
            own_l2=self.own_l2,
        )
        self._own_l2 = 0.0 if engine.own is None else engine.own.l2
        algorithm = build_algorithm(self.algorithm, self.objective, engine, rows.sizes, int(seed))
        exact = isinstance(algorithm, Newton)
        self.history_ = train(
            algorithm,
            engine,
            rounds=self.rounds,
            seed=int(seed),
            evaluate=("train",),
            every=self.rounds,
            progress=False,
            stop=[StopAtDecrement(self.tol) if exact else StopWhen(at_gap=self.tol)],
        )
        warn_if_unfinished(self.history_, algorithm, engine, self.tol)
        self.n_iter_ = len(self.history_.rounds)
        self.clients_ = rows.clients
        self._names = {name_key(c): n for c, n in zip(rows.clients, rows.names, strict=True)}
        self.client_weights_ = self.history_.weights[self.history_.rounds[-1].round]
        self._set_model(engine, module, classes)

    def _set_model(self, engine: Simulated, module: nn.Module, classes: int | None) -> None:
        """Set ``model_`` and, of a linear model, ``coef_`` and ``intercept_``."""
        assert self.history_.parameters is not None
        self.model_ = copy.deepcopy(module).double().eval().requires_grad_(False)
        self.model_.load_state_dict(self.history_.parameters)
        for name in ("coef_", "intercept_"):
            self.__dict__.pop(name, None)  # of an earlier fit
        layer = linear_layer(self.model_, engine.model.input_dimensions)
        if layer is None:
            return
        bias: Tensor | None = layer.bias  # None without an intercept
        if bias is not None and layer.out_features > 1 and classes is not None:
            bias.sub_(bias.mean())  # scores of classes may be shifted: it changes nothing
        self.coef_ = layer.weight.numpy().copy()
        self.intercept_: Any = np.zeros(len(self.coef_)) if bias is None else bias.numpy().copy()

    def _describe(self, rows: Rows, **more: Any) -> None:
        """Let the history predict what the estimator predicts, by name and without weights."""
        shape = rows.inputs.shape[1:]
        kept = self.history_.own or {}
        more |= {"own": kept, "loss": fitted_loss(more.pop("trained_by"))}
        more |= {"own_l2": self._own_l2} if kept else {}
        self.history_.trained = Predictor(self.model_, shape, clients=rows.names, **more)
        self.__dict__.pop("own_", None)  # of an earlier fit
        if kept:
            self.own_ = {name: part.numpy().copy() for name, part in kept.items()}

    def _outputs(self, X: ArrayLike, clients: ArrayLike | None = None) -> Array:
        """Return the module's outputs, shape (rows, outputs)."""
        check_is_fitted(self)
        inputs = validate_data(self, X, reset=False, dtype=np.float64)
        owners = None
        if clients is not None:
            given = _check_clients(clients, inputs)
            owners = [self._names.get(name_key(o), f"{o!r}, a stranger") for o in given]
        trained: Predictor = self.history_.trained
        if not trained.own:
            with torch.no_grad():
                whole: Tensor = self.model_(torch.tensor(inputs))
            return whole.reshape(len(inputs), -1).numpy()
        groups = group_by_module(self.model_, trained.own, trained.clients, owners, len(inputs))
        parts = [(mine, trained.run_module(module, inputs[mine])) for module, mine in groups]
        out = np.empty((len(inputs), parts[0][1].shape[1]))
        for mine, found in parts:
            out[mine] = found
        return out


class FairClassifier(ClassifierMixin, FairEstimator):  # type: ignore[misc]
    """Logistic regression, or any module, whose rows belong to clients.

    Parameters
    ----------
    objective : str, table or SaddleObjective
        What is minimised of the clients' losses: a name of ``equifed list objectives``, a table
        ``{"name": "cvar", "tail": 0.2}``, or an object. ``"average"`` counts every client alike;
        ``{"name": "average", "prior": "size"}`` every row.
    algorithm : str, table or Algorithm
        ``"auto"`` is Newton's method (:class:`equifed.sklearn.solving.Newton`) for linear models
        of at most 2000 parameters, else ``"scaff-pd"``; or a name of ``equifed list algorithms``, a
        table, or an object.
    model : str or torch.nn.Module
        A name of ``equifed list models``, or a module that maps (rows, features) to scores: one per
        class, or a single one for two classes.
    l2 : float
        Strength of the penalty on the weights; the intercept is free. The same as
        ``LogisticRegression(C=1 / (l2 * n))``.
    fit_intercept : bool
        Whether linear models have an intercept.
    rounds : int
        How many rounds at most; a ``ConvergenceWarning`` says that they were too few.
    tol : float
        Newton's method stops when the step that is left, measured by the Hessian, is below ``tol``
        times the root of the objective; other algorithms when their certificate is below ``tol``.
    random_state : int, RandomState or None
        Seed of everything that is drawn; Newton's method draws nothing.
    own : {"bias", "head", "norm"} or sequence of str, optional
        Parameters that every client keeps for itself, as for :func:`equifed.simulate`; ``fit`` then
        needs ``clients``. To predict, say whose rows they are (``clients``); rows of nobody, and of
        clients that were not fitted, are predicted with the mean of the own parts and a warning.
        Without own parts ``clients`` makes no difference to predictions.
    own_l2 : float, optional
        Strength of the penalty on own parameters, as for :func:`equifed.simulate`.

    Attributes
    ----------
    coef_, intercept_ : array
        Of linear models: shapes (1 or classes, features) and (1 or classes,).
    classes_ : array
    clients_, client_weights_ : array
        The clients in order of appearance, and the weight that each had in the solution.
    history_ : History
        What training recorded: certificate, losses and accuracies per client.
    model_ : torch.nn.Module
    own_ : dict of arrays
        Own parameters by name, a row for each of ``clients_``; only where there are any. Then
        ``intercept_`` and ``model_`` have their means.
    n_iter_, n_features_in_, feature_names_in_

    Examples
    --------
    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array(["no", "no", "yes", "yes"])
    >>> fair = FairClassifier(objective="worst-case").fit(X, y, clients=["a", "b", "a", "b"])
    >>> fair.predict([[0.2], [2.8]])
    array(['no', 'yes'], dtype='<U3')
    """

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        clients: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Fit to rows X with classes y; ``clients`` says whose row it is, None: all of one."""
        inputs, labels = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        weights = check_weights(sample_weight, inputs)
        present = np.unique(labels if weights is None else labels[weights > 0])
        if len(present) < 2:
            raise ValueError(
                f"FairClassifier needs rows of at least 2 classes, got one class: {present[0]!r}."
            )
        check_own(self.own, clients, weights)
        rows = Rows.sort(inputs, codes.astype(np.int64), clients, weights)
        count = len(self.classes_)
        loss, outputs = choose_scores(self.model, inputs, count)
        self._train(rows, loss, outputs, count)
        names = tuple(map(str, self.classes_))
        self._describe(rows, classes=names, link=link_of(loss), trained_by=loss)
        return self

    def decision_function(self, X: ArrayLike, clients: ArrayLike | None = None) -> Array:
        """Return scores: of the second of two classes (rows,), else of every class."""
        scores = self._outputs(X, clients)
        if len(self.classes_) > 2:
            return scores
        return scores[:, 0] if scores.shape[1] == 1 else scores[:, 1] - scores[:, 0]

    def predict_proba(self, X: ArrayLike, clients: ArrayLike | None = None) -> Array:
        """Return the probability of every class, shape (rows, classes)."""
        return np.exp(self.predict_log_proba(X, clients))

    def predict_log_proba(self, X: ArrayLike, clients: ArrayLike | None = None) -> Array:
        """Return the logarithms of the probabilities."""
        scores = self.decision_function(X, clients)
        if scores.ndim == 1:
            scores = np.stack([np.zeros_like(scores), scores], axis=1)
        return torch.log_softmax(torch.as_tensor(scores), dim=1).numpy()

    def predict(self, X: ArrayLike, clients: ArrayLike | None = None) -> Array:
        """Return the most probable class of every row."""
        scores = self.decision_function(X, clients)
        chosen = (scores > 0).astype(int) if scores.ndim == 1 else scores.argmax(axis=1)
        return np.asarray(self.classes_[chosen])


class FairRegressor(RegressorMixin, FairEstimator):  # type: ignore[misc]
    """Ridge regression, or any module under the squared loss, whose rows belong to clients.

    Parameters and attributes are those of :class:`FairClassifier`, without classes; y may have
    several columns, whose squared errors are added. ``l2`` is that of ``Ridge(alpha=l2 * n / 2)``.

    Examples
    --------
    >>> X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([1.0, 3.0, 5.0, 7.0])
    >>> FairRegressor(l2=0.0).fit(X, y).coef_.round(6)
    array([2.])
    """

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        clients: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Fit to rows X with values y; ``clients`` says whose row it is, None: all of one."""
        many = {"multi_output": True, "y_numeric": True}
        inputs, values = validate_data(self, X, y, dtype=np.float64, **many)
        values = np.asarray(values, dtype=np.float64)
        weights = check_weights(sample_weight, inputs)
        check_own(self.own, clients, weights)
        rows = Rows.sort(inputs, values, clients, weights)
        self.target_shape_ = values.shape[1:]
        self._train(rows, squared, int(np.prod(self.target_shape_)), None)
        self._describe(rows, outputs_shape=self.target_shape_, trained_by=squared)
        if values.ndim == 1 and hasattr(self, "coef_"):
            self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])
        return self

    def predict(self, X: ArrayLike, clients: ArrayLike | None = None) -> Array:
        """Return the values, shape (rows,) or (rows, columns of y)."""
        found = self._outputs(X, clients)
        return found.reshape(len(found), *self.target_shape_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

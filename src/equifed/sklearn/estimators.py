"""The two estimators, what they share, and rows by client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_consistent_length, check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data
from torch import Tensor, nn

from equifed.algorithms.fair_newton import FairNewton
from equifed.contract.algorithm import AnyAlgorithm
from equifed.contract.arrays import check_settings
from equifed.data import Federation, Split
from equifed.data.columns import name_key, name_values
from equifed.engines.simulate import simulate
from equifed.models.curvature import linear_layer
from equifed.models.losses import fitted_loss, squared
from equifed.models.predictor import Predictor, class_scores, link_of, most_likely
from equifed.objectives.base import SaddleObjective
from equifed.runs.candidates import choose
from equifed.sklearn import solving
from equifed.sklearn.solving import Array
from equifed.training import StopWhen, train


def _sort_rows(
    X: Array, y: Array, clients: ArrayLike | None, weights: Array | None
) -> tuple[tuple[str, ...], Array, Split, Array]:
    """Return names of clients in order of appearance, clients, rows by client, what these count.

    Rows that count nothing are left out; weights are a last column of the targets.
    """
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
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    targets, sizes = y[order], counts
    if weights is not None:  # a client's plain mean of weighted losses is its weighted mean
        sizes = np.add.reduceat(weights[order], offsets[:-1])
        share = weights[order] * np.repeat(counts / sizes, counts)
        values = targets.reshape(len(targets), -1).astype(np.float64)
        targets = np.concatenate([values, share[:, None]], axis=1)
    first = [int(np.argmax(place == k)) for k in range(len(known))]
    return tuple(names.values()), owners[first], Split(X[order], targets, offsets), sizes


def _check_clients(clients: ArrayLike | None, X: Array) -> Array:
    """Return the client of every row as objects."""
    if clients is None:
        return np.full(len(X), "all", dtype=object)
    check_consistent_length(X, clients)
    owners = np.empty(len(X), dtype=object)
    owners[:] = list(np.asarray(clients, dtype=object).tolist())
    if bad := [k for k, owner in enumerate(owners) if owner is None or owner != owner]:
        raise ValueError(
            f"clients: row {bad[0]} has no client ({owners[bad[0]]!r}), nor have "
            f"{len(bad) - 1} others; every row needs one."
        )
    return owners


class FairEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn has no types
    """What both estimators share; see :class:`FairClassifier` for the parameters."""

    _checks: ClassVar[dict[str, bool]] = {}  # of y

    def __init__(
        self, *, objective: str | Mapping[str, Any] | SaddleObjective = "auto",
        algorithm: str | Mapping[str, Any] | AnyAlgorithm = "auto",
        model: str | nn.Module = "linear", l2: float = 1e-3, fit_intercept: bool = True,
        rounds: int = 200, tol: float = 1e-10, random_state: int | np.random.RandomState | None = 0,
        own: str | Sequence[str] | None = None, own_l2: float | None = None, privacy: Any = None,
    ) -> None:  # fmt: skip
        self.objective, self.algorithm, self.model, self.l2 = objective, algorithm, model, l2
        self.fit_intercept, self.rounds, self.tol = fit_intercept, rounds, tol
        self.random_state, self.own, self.own_l2, self.privacy = random_state, own, own_l2, privacy

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        clients: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Fit to rows X and y; ``clients`` says whose row it is, None: all of one."""
        inputs, given = validate_data(self, X, y, dtype=np.float64, **self._checks)
        weights = None
        if sample_weight is not None:
            weights = np.asarray(_check_sample_weight(sample_weight, inputs, dtype=np.float64))
            if weights.min() < 0 or not weights.max() > 0:
                raise ValueError(
                    "sample_weight must not be negative and not zero everywhere, got a smallest "
                    f"of {weights.min():g} and a largest of {weights.max():g}."
                )
            weights = None if (weights == weights[0]).all() else weights
        targets = self._read_targets(given, weights)
        if self.own is not None and clients is None:
            raise ValueError(
                f"own={self.own!r} needs clients: pass the client of every row, "
                "fit(X, y, clients=...), or leave own out."
            )
        for name in ("own", "privacy"):  # no bound is declared on what a row counts
            if getattr(self, name) is not None and weights is not None:
                given = f"{name}={getattr(self, name)!r:.40}"
                raise ValueError(f"{given} and sample_weight do not go together; leave one out.")
        check_settings(self, l2="[0, inf)", rounds="[1, inf)", tol="(0, inf)")
        self._train(*_sort_rows(inputs, targets, clients, weights), weights is not None)
        return self

    def _train(
        self, names: tuple[str, ...], clients: Array, rows: Split, sizes: Array, weighted: bool
    ) -> None:
        """Train on checked rows and set the fitted attributes."""
        seed, inputs = self.random_state, rows.inputs
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        seed = int(seed)
        loss, outputs, about = self._choose_loss(inputs)
        labels = "classes" in about
        classes = len(about["classes"]) if labels and not weighted else None
        module = solving.build_module(self.model, inputs.shape[1], outputs, self.fit_intercept)
        data = Federation("fit", names, rows, classes=classes)
        chosen = self._choose(data, seed, weighted)
        objective, counted = chosen.pop("objective"), solving.SampleWeighted(loss, labels)
        engine = simulate(
            data, module, counted if weighted else loss, penalise="weights", dtype=torch.float64,
            init="fresh" if isinstance(self.model, str) else "given", privacy=self.privacy,
            **chosen,
        )  # fmt: skip
        algorithm = solving.build_algorithm(self.algorithm, objective, engine, sizes, seed)
        # under privacy nothing is asked that is not paid for
        plan: dict[str, Any] = {"rounds": getattr(self.privacy, "rounds", 0), "evaluate": ()}
        if self.privacy is None:
            exact = isinstance(algorithm, FairNewton)
            stop = solving.StopAtDecrement(self.tol) if exact else StopWhen(at_gap=self.tol)
            plan = {"rounds": self.rounds, "evaluate": ("train",), "every": self.rounds}
            plan["stop"] = [stop]
        self.history_ = train(algorithm, engine, seed=seed, progress=False, **plan)
        if self.privacy is None:
            solving.warn_if_unfinished(self.history_, algorithm, engine, self.tol)
        self.n_iter_, self.clients_ = len(self.history_.rounds), clients
        self._names = {name_key(c): n for c, n in zip(clients, names, strict=True)}
        self.client_weights_ = self.history_.weights[self.history_.rounds[-1].round]
        self._set_model(module, labels)
        # The history predicts what the estimator predicts, by name and without weights.
        about |= {"clients": names, "own": self.history_.own or {}, "loss": fitted_loss(loss)}
        about |= {} if engine.own is None else {"own_l2": engine.own.l2}
        self.history_.trained = Predictor(self.model_, inputs.shape[1:], **about)
        if about["own"]:
            self.own_ = {name: part.numpy().copy() for name, part in about["own"].items()}

    def _choose(self, data: Federation, seed: int, weighted: bool) -> dict[str, Any]:
        """Return objective, penalties and own part: as given, or by the rule of ``equifed.fit``."""
        given = {key: getattr(self, key) for key in ("objective", "l2", "own", "own_l2")}
        self.choice_ = "as given"
        if not (isinstance(self.objective, str) and self.objective == "auto"):
            return given
        given["objective"] = "average"
        words = isinstance(self.model, str) and isinstance(self.algorithm, str)
        usual = words and (self.model, self.algorithm) == ("linear", "auto") and self.fit_intercept
        if len(data) < 2:
            self.choice_ = "an ordinary model: there are no clients to serve (fit with clients=)"
        elif self.privacy is not None:
            self.choice_ = "one model for the average: to choose has a price, too (ef.fit pays it)"
        elif weighted or not usual or self.own is not None or data.train.targets.ndim > 1:
            self.choice_ = "one model for the average: the rule is for plain linear models"
        else:
            found = choose(data, seed, None, lambda _: None)
            point, self.choice_ = found.point, str(replace(found, keepers=()))
            fair: Any = {"name": "chi-square", "rho": point.rho}
            given["objective"] = "average" if point.rho is None else fair
            given |= {"l2": point.l2, "own": None if point.own_l2 is None else "bias"}
            given["own_l2"] = point.own_l2
        return given

    def _set_model(self, module: nn.Module, labels: bool) -> None:
        """Set ``model_`` and, of a linear model, ``coef_`` and ``intercept_``."""
        assert self.history_.parameters is not None
        self.model_ = copy.deepcopy(module).double().eval().requires_grad_(False)
        self.model_.load_state_dict(self.history_.parameters)
        for name in ("coef_", "intercept_", "own_"):
            self.__dict__.pop(name, None)  # of an earlier fit
        layer = linear_layer(self.model_, 1)
        if layer is None:
            return
        bias: Tensor | None = layer.bias  # None without an intercept
        if bias is not None and layer.out_features > 1 and labels:
            bias.sub_(bias.mean())  # scores of classes may be shifted: it changes nothing
        self.coef_ = layer.weight.numpy().copy()
        self.intercept_: Any = np.zeros(len(self.coef_)) if bias is None else bias.numpy().copy()

    def _outputs(self, X: ArrayLike, clients: ArrayLike | None = None) -> Array:
        """Return the module's outputs, shape (rows, outputs)."""
        check_is_fitted(self)
        inputs = validate_data(self, X, reset=False, dtype=np.float64)
        owners = None
        if clients is not None:
            given = _check_clients(clients, inputs)
            owners = [self._names.get(name_key(o), f"{o!r}, a stranger") for o in given]
        trained: Predictor = self.history_.trained
        return trained.answer_owners(inputs, owners)


class FairClassifier(ClassifierMixin, FairEstimator):  # type: ignore[misc]
    """Logistic regression, or any module, whose rows belong to clients.

    Parameters
    ----------
    objective : str, table or SaddleObjective
        What is minimised of the clients' losses. ``"auto"``: with ``clients`` the rule of
        :func:`equifed.fit` chooses objective, own part and ``l2`` on held-out rows (``choice_``
        says what), for linear models without weights of samples; without ``clients`` it is an
        ordinary model. Or a name of ``equifed list objectives``, a table
        ``{"name": "cvar", "tail": 0.2}``, or an object. ``"average"`` counts every client alike;
        ``{"name": "average", "prior": "size"}`` every row.
    algorithm : str, table or Algorithm
        ``"auto"`` is :class:`equifed.FairNewton` for linear models of at most 2000 parameters, else
        ``"scaff-pd"``; or a name of ``equifed list algorithms``, a table, or an object.
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
        FairNewton stops when the step that is left, measured by the Hessian, is below ``tol`` times
        the root of the objective; other algorithms when their certificate is below ``tol``.
    random_state : int, RandomState or None
        Seed of everything that is drawn; FairNewton draws nothing.
    own : {"bias", "head", "norm"} or sequence of str, optional
        Parameters that every client keeps for itself, as for :func:`equifed.simulate`; ``fit`` then
        needs ``clients``. To predict, say whose rows they are (``clients``); rows of nobody, and of
        clients that were not fitted, are predicted with the mean of the own parts and a warning.
        Without own parts ``clients`` makes no difference to predictions.
    own_l2 : float, optional
        Strength of the penalty on own parameters, as for :func:`equifed.simulate`.
    privacy : Privacy, optional
        Differential privacy of the rows, as for :func:`equifed.simulate`: ``equifed.Privacy(...)``,
        which says how many rounds there are. Every call of ``fit`` spends its budget, so that those
        of a grid search add up; ``secret=True`` is for models that are published. Names of classes
        and clients, and the number of rows, are not protected.

    Attributes
    ----------
    coef_, intercept_ : array
        Of linear models: shapes (1 or classes, features) and (1 or classes,).
    classes_ : array
    choice_ : str
        What ``objective="auto"`` chose, and why.
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

    def _read_targets(self, labels: Array, weights: Array | None) -> Array:
        """Return the numbers of classes."""
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        present = np.unique(labels if weights is None else labels[weights > 0])
        if len(present) < 2:
            raise ValueError(f"FairClassifier needs 2 classes, got one class: {present[0]!r}.")
        return codes.astype(np.int64)

    def _choose_loss(self, inputs: Array) -> tuple[solving.Loss, int, dict[str, Any]]:
        loss, outputs = solving.choose_scores(self.model, inputs, len(self.classes_))
        return loss, outputs, {"classes": tuple(map(str, self.classes_)), "link": link_of(loss)}

    def decision_function(self, X: ArrayLike, clients: ArrayLike | None = None) -> Array:
        """Return scores: of the second of two classes (rows,), else of every class."""
        return class_scores(self._outputs(X, clients))

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
        chosen = most_likely(self.decision_function(X, clients))
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

    _checks: ClassVar[dict[str, bool]] = {"multi_output": True, "y_numeric": True}

    def _read_targets(self, values: Array, weights: Array | None) -> Array:
        self.target_shape_ = values.shape[1:]
        return np.asarray(values, dtype=np.float64)

    def _choose_loss(self, inputs: Array) -> tuple[solving.Loss, int, dict[str, Any]]:
        shape = self.target_shape_
        return squared, int(np.prod(shape)), {"outputs_shape": shape}

    def _set_model(self, module: nn.Module, labels: bool) -> None:
        super()._set_model(module, labels)
        if not self.target_shape_ and hasattr(self, "coef_"):
            self.coef_, self.intercept_ = self.coef_[0], float(self.intercept_[0])

    def predict(self, X: ArrayLike, clients: ArrayLike | None = None) -> Array:
        """Return the values, shape (rows,) or (rows, columns of y)."""
        found = self._outputs(X, clients)
        return found.reshape(len(found), *self.target_shape_)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

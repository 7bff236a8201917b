"""The two estimators, what they share, and rows by client."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
from equifed.data.columns import name_key, name_values
from equifed.data.federation import Federation
from equifed.data.split import Split
from equifed.engines.simulate import simulate
from equifed.models.curvature import linear_layer
from equifed.models.losses import fitted_loss, squared
from equifed.models.predictor import Predictor, class_scores, link_of, most_likely
from equifed.objectives.base import SaddleObjective
from equifed.runs.candidates import choose
from equifed.sklearn import solving
from equifed.sklearn.solving import Array
from equifed.training.final_model import StopWhen
from equifed.training.loop import train


@dataclass(frozen=True, eq=False)
class Rows:
    """Samples sorted by client."""

    names: tuple[str, ...]  # of the clients, in order of appearance
    clients: Array  # as they were given
    inputs: Array
    targets: Array
    counts: Array  # rows of each client
    weights: Array | None  # what each row counts, all above zero; None: one

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
        """Return the rows as a federation has them; weights are a last column of the targets."""
        offsets = np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)
        if self.weights is None:
            return Split(self.inputs, self.targets, offsets)
        # So that a client's plain mean of weighted losses is its weighted mean.
        share = self.weights * np.repeat(self.counts / self.sizes, self.counts)
        values = self.targets.reshape(len(self.targets), -1).astype(np.float64)
        return Split(self.inputs, np.concatenate([values, share[:, None]], axis=1), offsets)


def check_own(own: Any, clients: ArrayLike | None, weights: Array | None) -> None:
    """Refuse own parts of nobody, and of rows that count differently."""
    if own is None:
        return
    if clients is None:
        raise ValueError(
            f"own={own!r} needs clients: pass the client of every row, "
            "fit(X, y, clients=...), or leave own out."
        )
    if weights is not None:
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

    _checks: ClassVar[dict[str, bool]] = {}  # of y

    def __init__(
        self,
        *,
        objective: str | Mapping[str, Any] | SaddleObjective = "auto",
        algorithm: str | Mapping[str, Any] | AnyAlgorithm = "auto",
        model: str | nn.Module = "linear",
        l2: float = 1e-3,
        fit_intercept: bool = True,
        rounds: int = 200,
        tol: float = 1e-10,
        random_state: int | np.random.RandomState | None = 0,
        own: str | Sequence[str] | None = None,
        own_l2: float | None = None,
        privacy: Any = None,
    ) -> None:
        self.privacy = privacy
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

    def fit(
        self,
        X: ArrayLike,
        y: ArrayLike,
        clients: ArrayLike | None = None,
        sample_weight: ArrayLike | None = None,
    ) -> Self:
        """Fit to rows X and y; ``clients`` says whose row it is, None: all of one."""
        inputs, given = validate_data(self, X, y, dtype=np.float64, **self._checks)
        weights = check_weights(sample_weight, inputs)
        targets = self._read_targets(given, weights)
        check_own(self.own, clients, weights)
        solving.check_parameters(self.l2, self.rounds, self.tol)
        if self.privacy is not None and weights is not None:
            raise ValueError(
                "privacy and sample_weight do not go together: no bound is declared on what a row "
                "counts; leave one of them out."
            )
        self._train(Rows.sort(inputs, targets, clients, weights))
        return self

    def _train(self, rows: Rows) -> None:
        """Train on checked rows and set the fitted attributes."""
        seed = self.random_state
        if not isinstance(seed, int | np.integer):
            seed = check_random_state(seed).randint(2**31 - 1)
        loss, outputs, about = self._choose_loss(rows.inputs)
        labels, weighted = "classes" in about, rows.weights is not None
        classes = len(about["classes"]) if labels and not weighted else None
        module = solving.build_module(self.model, rows.inputs.shape[1], outputs, self.fit_intercept)
        data = Federation("fit", rows.names, rows.split(), classes=classes)
        chosen = self._choose(data, int(seed), weighted)
        engine = simulate(
            data,
            module,
            solving.SampleWeighted(loss, labels) if weighted else loss,
            l2=chosen["l2"],
            penalise="weights",
            dtype=torch.float64,
            init="fresh" if isinstance(self.model, str) else "given",
            own=chosen["own"],
            own_l2=chosen["own_l2"],
            privacy=self.privacy,
        )
        algorithm = solving.build_algorithm(
            self.algorithm, chosen["objective"], engine, rows.sizes, int(seed)
        )
        if self.privacy is None:
            exact = isinstance(algorithm, FairNewton)
            plan: dict[str, Any] = {"rounds": self.rounds, "evaluate": ("train",)}
            stop = solving.StopAtDecrement(self.tol) if exact else StopWhen(at_gap=self.tol)
            plan |= {"every": self.rounds, "stop": [stop]}
        else:  # nothing is asked that is not paid for
            plan = {"rounds": self.privacy.rounds, "evaluate": ()}
        self.history_ = train(algorithm, engine, seed=int(seed), progress=False, **plan)
        if self.privacy is None:
            solving.warn_if_unfinished(self.history_, algorithm, engine, self.tol)
        self.n_iter_ = len(self.history_.rounds)
        self.clients_ = rows.clients
        self._names = {name_key(c): n for c, n in zip(rows.clients, rows.names, strict=True)}
        self.client_weights_ = self.history_.weights[self.history_.rounds[-1].round]
        self._set_model(module, labels)
        # The history predicts what the estimator predicts, by name and without weights.
        about |= {"clients": rows.names, "own": self.history_.own or {}, "loss": fitted_loss(loss)}
        about |= {} if engine.own is None else {"own_l2": engine.own.l2}
        self.history_.trained = Predictor(self.model_, rows.inputs.shape[1:], **about)
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
            raise ValueError(
                f"FairClassifier needs rows of at least 2 classes, got one class: {present[0]!r}."
            )
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

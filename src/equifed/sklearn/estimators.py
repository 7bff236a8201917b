"""The two estimators, and what they share."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor, nn

from equifed.contract.algorithm import AnyAlgorithm
from equifed.data.federation import Federation
from equifed.engines.simulate import Simulated, simulate
from equifed.models.curvature import linear_layer
from equifed.models.losses import squared
from equifed.models.newton import fitted_loss
from equifed.models.predictor import Predictor, group_by_module, link_of
from equifed.objectives.base import SaddleObjective
from equifed.sklearn.newton import Newton
from equifed.sklearn.rows import Array, Rows, check_own, check_weights, find_owners
from equifed.sklearn.solving import (
    SampleWeighted,
    StopAtDecrement,
    build_algorithm,
    build_module,
    check_parameters,
    choose_scores,
    warn_if_unfinished,
)
from equifed.training.loop import train
from equifed.training.stopping import StopWhen


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
        self._rows = replace(rows, inputs=rows.inputs[:0], targets=rows.targets[:0], weights=None)
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
        owners = None if clients is None else find_owners(clients, inputs, self._rows)
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
        ``"auto"`` is Newton's method (:class:`equifed.sklearn.newton.Newton`) for linear models
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

    def __init__(
        self,
        *,
        objective: str | Mapping[str, Any] | SaddleObjective = "average",
        algorithm: str | Mapping[str, Any] | AnyAlgorithm = "auto",
        model: str | nn.Module = "logistic",
        l2: float = 1e-3,
        fit_intercept: bool = True,
        rounds: int = 200,
        tol: float = 1e-10,
        random_state: int | np.random.RandomState | None = 0,
        own: str | Sequence[str] | None = None,
        own_l2: float | None = None,
    ) -> None:
        super().__init__(
            objective=objective, algorithm=algorithm, model=model, l2=l2,
            fit_intercept=fit_intercept, rounds=rounds, tol=tol, random_state=random_state,
            own=own, own_l2=own_l2,
        )  # fmt: skip

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

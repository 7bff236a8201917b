r"""Estimators for scikit-learn whose rows may belong to clients (needs ``equifed[sklearn]``).

Both minimise an objective of the clients' mean losses, each with a penalty on the weights:

.. math:: \Phi(l_1, \ldots, l_N), \qquad
          l_i = \frac1{m_i} \sum_{s \in i} \text{loss}_s + \frac{\text{l2}}2 |\text{coef}|^2

The intercept is not penalised and nothing is scaled. Without ``clients`` all n rows are one client
and every objective is ordinary regularised regression:

* ``FairClassifier(l2=l2)`` is ``LogisticRegression(C=1 / (l2 * n))``,
* ``FairRegressor(l2=l2)`` is ``Ridge(alpha=l2 * n / 2)``

with the sum of the sample weights in the place of n where there are any.
"""

try:
    import sklearn  # noqa: F401
except ImportError as error:  # pragma: no cover - scikit-learn is there in the tests
    raise ImportError(
        "equifed.sklearn needs scikit-learn 1.6 or newer: pip install 'equifed[sklearn]'."
    ) from error

from equifed.sklearn.estimators import FairClassifier, FairRegressor

__all__ = ["FairClassifier", "FairRegressor"]

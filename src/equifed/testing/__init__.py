"""Does your algorithm, objective or engine keep the contract? The conformance suite says.

>>> import equifed as ef
>>> check_algorithm(ef.FedAvg(ef.LocalSGD(lr=0.05, steps=3, batch_size=3)))
>>> check_objective(ef.objectives.CVaR(tail=0.5))

:func:`check_engine` does the same for an engine, a class derived from ``Clients``.

Everything runs on small data that are made here, in a second or so. What the suite cannot know is
whether the method is the one that was meant: for that compare it with a naive version of its
pseudo-code, and with a known method that it reduces to.

:func:`with_liar` makes one client of a simulation lie, to try out guards.
"""

from equifed.testing.algorithms import ALGORITHM_CHECKS, check_algorithm
from equifed.testing.engines import ENGINE_CHECKS, check_engine
from equifed.testing.liars import with_liar
from equifed.testing.objectives import OBJECTIVE_CHECKS, check_objective

__all__ = [
    "ALGORITHM_CHECKS", "ENGINE_CHECKS", "OBJECTIVE_CHECKS", "check_algorithm", "check_engine",
    "check_objective", "with_liar",
]  # fmt: skip

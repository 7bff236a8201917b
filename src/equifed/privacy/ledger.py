r"""What the answers of one site cost in privacy, added up and kept on disk.

A value that moves by at most D (its L2 sensitivity) when one unit's rows are replaced gets Gaussian
noise of deviation sigma. The squares :math:`(D/\sigma)^2` of adaptively chosen answers add up to
:math:`\mu^2`; together they are (epsilon, delta)-private for

.. math:: \delta(\epsilon) = \Phi(-\epsilon/\mu + \mu/2) - e^\epsilon\, \Phi(-\epsilon/\mu - \mu/2)

(Balle and Wang 2018). Answers about a sample of the rows are no single mu; an accountant composes
them (the extra ``dp``).
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from equifed.contract.arrays import check_settings, show_text
from equifed.training.files import UNREADABLE, write_file

Unit = Literal["record", "person", "client"]
"""Whose rows are replaced by others: one row, those of one person, or all of a client."""

FORMAT = 1
ROUNDING = 1e-9  # share of the budget by which sums of squares may be off
LEAST = 4 * sys.float_info.epsilon  # smallest relative error of a root that can be asked for
ACCURACY = 1.01  # factor by which noise of sampled steps may be more than is needed
ORDERS = (*range(2, 33), 40, 48, 64, 96, 128)  # of Renyi divergences; whole ones are quick


class OverBudget(RuntimeError):
    """An answer would cost more than what is left of a privacy budget."""


class NoAccountant(RuntimeError):
    """The accountant of sampled rows is not installed."""


def delta_of(epsilon: float, mu: float) -> float:
    """Return the delta of answers with these squares' root mu, for an epsilon."""
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    first = float(log_ndtr(-epsilon / mu + mu / 2))
    second = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    # exp(first) - exp(second), without cancelling where both are tiny
    return max(0.0, math.exp(first) * -math.expm1(min(0.0, second - first)))


def epsilon_of(mu: float, delta: float) -> float:
    """Return the smallest epsilon of answers with these squares' root mu, for a delta."""
    check_delta(delta)
    if mu == 0 or delta_of(0.0, mu) <= delta:
        return 0.0
    return _find_root(lambda epsilon: delta - delta_of(epsilon, mu), xtol=1e-13)


def mu_of(epsilon: float, delta: float) -> float:
    """Return the largest mu that an epsilon and a delta allow."""
    check_delta(delta)
    if not (epsilon > 0 and math.isfinite(epsilon)):
        raise ValueError(f"epsilon must be positive and finite, got {epsilon}.")
    mu = _find_root(lambda mu: delta_of(epsilon, mu) - delta, xtol=1e-15, rtol=1e-14)
    while delta_of(epsilon, mu) > delta:  # never above what the budget allows
        mu *= 1 - 1e-13
    return mu


def _find_root(rising: Callable[[float], float], xtol: float, rtol: float = LEAST) -> float:
    """Return where a function that is negative at 0 and rises is zero."""
    from scipy.optimize import brentq

    high = 1.0
    while rising(high) <= 0:
        high *= 2
    return float(brentq(rising, 0.0, high, xtol=xtol, rtol=rtol))


def check_delta(delta: float) -> None:
    """Refuse a delta that promises nothing."""
    if not 0 < delta < 0.5:
        raise ValueError(f"delta must lie in (0, 0.5), got {delta}; 1e-5 is usual.")


@dataclass(frozen=True)
class Entry:
    """One kind of answer: its L2 sensitivity, the noise's deviation, and how often it was given.

    ``q`` is the share of a site's rows that each is about, drawn without replacement; the
    sensitivity is that of replacing a row that was drawn.
    """

    kind: str
    sensitivity: float
    sigma: float
    q: float = 1.0
    steps: int = 1

    def __post_init__(self) -> None:
        check_settings(self, sensitivity="(0, inf)", sigma="(0, inf)", q="(0, 1]", steps="[1, inf)")

    @property
    def square(self) -> float:
        """The sum of (D / sigma)^2, of all rows."""
        return self.steps * (self.sensitivity / self.sigma) ** 2


def compose(entries: Sequence[Entry], delta: float) -> float:
    """Return the epsilon of all entries; of sampled rows an upper bound by Renyi divergences."""
    if all(entry.q == 1 for entry in entries):
        return epsilon_of(math.sqrt(math.fsum(entry.square for entry in entries)), delta)
    try:
        import dp_accounting as dp
        from dp_accounting.rdp import RdpAccountant
    except ImportError:
        raise NoAccountant(
            "Answers about a sample of the rows (minibatches) need an accountant: pip install "
            "'equifed[dp]', or take all rows (batch_size = None)."
        ) from None
    check_delta(delta)
    accountant = RdpAccountant(ORDERS, dp.NeighboringRelation.REPLACE_ONE)
    for entry in entries:
        # The accountant knows counts of rows, not shares: round towards more.
        noised = dp.GaussianDpEvent(entry.sigma / entry.sensitivity)
        drawn = math.ceil(entry.q * 1_000_000)
        sampled = dp.SampledWithoutReplacementDpEvent(1_000_000, drawn, noised)
        accountant.compose(noised if entry.q == 1 else sampled, entry.steps)
    return float(accountant.get_epsilon(delta))


@functools.lru_cache(maxsize=1024)
def find_factor(epsilon: float, delta: float, each: tuple[tuple[float, float, int], ...]) -> float:
    """Return what to multiply each sigma / D with; beside it are the share of rows and a count."""
    if all(q == 1 for _, q, _ in each):
        return math.sqrt(sum(n / raw**2 for raw, _, n in each)) / mu_of(epsilon, delta)

    def fits(factor: float) -> bool:
        return compose([Entry("", 1.0, factor * raw, q, n) for raw, q, n in each], delta) <= epsilon

    high = 1 / mu_of(epsilon, delta)
    while not fits(high):
        high *= 2
    low = high / 2
    while fits(low):
        low, high = low / 2, low
    while high > ACCURACY * low:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if fits(middle) else (middle, high)
    return high


class Ledger:
    """The budget of one site, which is what may be published, and what it has spent.

    Entries are kept over runs in the file ``path``, if it is given, which is written before
    :meth:`spend` returns. ``unit`` is whose rows are protected, ``name`` the site.
    """

    def __init__(
        self, epsilon: float, delta: float, *, unit: Unit = "record",
        path: str | Path | None = None, name: str = "this site",
    ) -> None:  # fmt: skip
        self.mu, self.epsilon, self.delta = mu_of(epsilon, delta), float(epsilon), float(delta)
        self.unit, self.name, self.path = unit, name, None if path is None else Path(path)
        check_settings(self, unit=get_args(Unit))
        self.entries: list[Entry] = []
        self._reload()

    @property
    def spent(self) -> float:
        """Epsilon of all answers so far; what to publish is the budget."""
        return compose(self.entries, self.delta)

    @property
    def left(self) -> float:
        """Squares (D / sigma)^2 that answers about all rows may still add up to, at most."""
        return self.mu**2 - math.fsum(entry.square for entry in self.entries)

    def spend(self, *entries: Entry) -> None:
        """Enter answers, or refuse all of them by name; call it before they leave."""
        self._reload()  # another process may have spent
        counts = Counter[tuple[str, float, float, float]]()
        for e in (*self.entries, *entries):  # equal ones are counted together
            counts[e.kind, e.sensitivity, e.sigma, e.q] += e.steps
        after = [Entry(*key, steps) for key, steps in counts.items()]
        if all(entry.q == 1 for entry in after):
            fits = math.fsum(e.square for e in after) <= self.mu**2 * (1 + ROUNDING)
        else:
            fits = compose(after, self.delta) <= self.epsilon
        if not fits:
            kinds = ", ".join(dict.fromkeys(entry.kind for entry in entries))
            raise OverBudget(
                f"Client {show_text(self.name)}: {kinds} would take epsilon from {self.spent:.3g} "
                f"to {compose(after, self.delta):.3g}, its budget is {self.epsilon:g} (delta "
                f"{self.delta:g}). Plan fewer rounds or more noise, or give it a larger epsilon."
            )
        if self.path is not None:  # on the disk first
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_file(self.path, json.dumps(self.to_dict(after), indent=1).encode())
        self.entries = after

    def to_dict(self, entries: Sequence[Entry] | None = None) -> dict[str, Any]:
        """Return budget and entries as a JSON file holds them."""
        listed = self.entries if entries is None else entries
        told = {"format": FORMAT, "name": self.name, "unit": self.unit, "epsilon": self.epsilon}
        return {**told, "delta": self.delta, "entries": [asdict(entry) for entry in listed]}

    @classmethod
    def from_dict(cls, told: dict[str, Any]) -> Ledger:
        """Return the ledger that :meth:`to_dict` described, without a file."""
        if told["format"] != FORMAT:
            raise ValueError(f"format {told['format']}, this version reads {FORMAT}")
        made = cls(told["epsilon"], told["delta"], unit=told["unit"], name=told["name"])
        made.entries = [Entry(**entry) for entry in told["entries"]]
        return made

    def _reload(self) -> None:
        """Take the entries of the file, if there is one; with a damaged one nothing is answered."""
        path = self.path
        if path is None or not path.exists():
            return
        try:
            known = Ledger.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except UNREADABLE as error:
            raise RuntimeError(
                f"The privacy ledger {path} cannot be read ({error}). What was spent is not known, "
                "so nothing is answered: restore the file from a backup."
            ) from error
        if (known.unit, known.delta) != (self.unit, self.delta):
            raise ValueError(
                f"The privacy ledger {path} counts unit {known.unit!r} at delta {known.delta:g}, "
                f"asked for are unit {self.unit!r} at delta {self.delta:g}; keep to the ledger's."
            )
        self.entries = known.entries

r"""What answers cost in privacy: kinds, declared bounds, how a budget is split, what is spent.

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
from typing import Any, Literal, NamedTuple, get_args

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
    """One kind of answer: its L2 sensitivity, the noise's deviation, and how often it was given."""

    kind: str
    sensitivity: float  # where q < 1: of replacing a row that was drawn
    sigma: float
    q: float = 1.0  # share of a site's rows that each is about, drawn without replacement
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


class Mechanism(NamedTuple):
    """One kind of answer: what it is, and its part of mu^2 of those that are asked."""

    words: str
    part: float


MECHANISMS = {
    "moments": Mechanism("second moments", 1.0),
    "losses": Mechanism("mean loss", 1.0),
    "gradients": Mechanism("mean gradient", 3.0),
    "steps": Mechanism("gradient of a local step", 3.0),
    "updates": Mechanism("sum of updates", 0.0),  # at the server, of whole clients
}
IDLE = 0.1  # part of losses that are recorded but decide nothing


@dataclass(frozen=True)
class Planned:
    """How often one client is asked in all rounds together."""

    moments: int = 0
    losses: int = 0
    gradients: int = 0
    steps: int = 0
    q: float = 1.0  # share of its rows in each local step
    idle: bool = False  # losses decide nothing
    part: float = 1.0  # of mu^2 for this plan, where a client has several

    def counts(self) -> dict[str, int]:
        """Return the kinds that are asked, and how often."""
        return {kind: count for kind in MECHANISMS if (count := getattr(self, kind, 0))}


@dataclass(frozen=True)
class Bounds:
    """Bounds on rows, and the budget of their client; see :class:`equifed.Privacy`."""

    epsilon: float
    rows: float
    loss: float
    rounds: int
    delta: float = 1e-5
    unit: Unit = "record"
    gradient: float | None = None
    most_rows: int = 1
    preparation: Literal["refused", "public"] = "refused"
    secret: bool = False

    def __post_init__(self) -> None:
        bounds = dict.fromkeys(("epsilon", "rows", "loss", "gradient"), "(0, inf)")
        bounds |= dict.fromkeys(("rounds", "most_rows"), "[1, inf)")
        check_settings(self, unit=get_args(Unit), preparation=("refused", "public"), **bounds)
        check_delta(self.delta)
        for name in ("rounds", "most_rows"):
            if (value := getattr(self, name)) != int(value):
                raise ValueError(f"Privacy {name} must be a whole number, got {value}.")
        if self.most_rows > 1 and self.unit == "record":
            raise ValueError(f"Privacy most_rows={self.most_rows} needs unit='person'.")

    def split(self, planned: Planned) -> dict[str, float]:
        """Return the share of mu^2 of every kind that is asked."""
        parts = {kind: MECHANISMS[kind].part for kind in planned.counts()}
        if planned.idle and "losses" in parts:
            parts["losses"] *= IDLE
        whole = math.fsum(parts.values())
        return {kind: part / whole for kind, part in parts.items()}

    def multipliers(self, planned: Planned) -> dict[str, float]:
        """Return sigma / D of every kind, so that all planned answers meet the budget."""
        shares, each = self.split(planned), {}
        for kind, times in planned.counts().items():
            q = planned.q if kind == "steps" else 1.0
            each[kind] = q * math.sqrt(times / shares[kind]), q, times
        factor = find_factor(self.epsilon, self.delta, tuple(each.values()))
        return {kind: factor * raw / math.sqrt(planned.part) for kind, (raw, *_) in each.items()}

    def reach(self, slope: float = 1.0, bias: bool = True, squared: bool = False) -> dict[str, Any]:
        """Return how far another row moves the sum of each kind of answer, at most.

        Gradients are as long as the loss's ``slope`` in the outputs times the row, with the one of
        a bias; moments are of rows with the targets of a ``squared`` loss.
        """
        long = math.sqrt(self.rows**2 + bias)
        longest = slope * long if self.gradient is None else self.gradient
        square = long**2 + (self.loss if squared else 0.0)
        moved = {"moments": math.sqrt(2.0) * square, "losses": self.loss}
        return moved | dict.fromkeys(("gradients", "steps"), 2 * longest)

    def price(
        self, kind: str, planned: Planned, reach: float, size: int, count: int | None = None,
        steps: int = 1, slack: float = 1.0,
    ) -> Entry:  # fmt: skip
        """Return what answers cost about ``count`` of ``size`` rows, by default as planned."""
        count = count or (round(planned.q * size) if kind == "steps" else size)
        moved, scale = reach / count * self.most_rows, self.multipliers(planned)[kind]
        return Entry(kind, moved * slack, scale * moved * slack, count / size, steps)

    def describe(self) -> str:
        """Say what is protected, and by what budget."""
        whose = f"every {'row' if self.unit == 'record' else 'person'} of a client"
        budget = f"epsilon {self.epsilon:g} at delta {self.delta:g}"
        return f"Privacy: {whose} has {budget} by noise added at the client"

    def to_dict(self) -> dict[str, object]:
        """Return the settings as a configuration has them, without what is not given."""
        return {name: value for name, value in asdict(self).items() if value is not None}


class Ledger:
    """The budget of one site, which is what may be published, and what it has spent.

    Entries are kept over runs in the file ``path``, if it is given. ``unit`` is whose rows are
    protected, ``name`` the site.
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


def list_entries(ledger: Ledger) -> list[dict[str, Any]]:
    """Return every kind of answer with its ``share`` of mu^2, if any, and its epsilon ``alone``."""
    shares = [e.square / ledger.mu**2 if e.q == 1 else None for e in ledger.entries]
    pairs = zip(ledger.entries, shares, strict=True)
    return [asdict(e) | {"share": s, "alone": compose([e], ledger.delta)} for e, s in pairs]

"""What a run is going to ask of a site, signed by its operator before anything is asked.

``rehearsal`` finds out which questions an algorithm asks; ``account`` holds a site's requests
against them.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from equifed.training.keys import KeyProblem, sign

PURPOSE = "plan"
ROUND = "losses|gradient|local|sum|opened|norms|curvature|recall"
"""How the names of steps of a round begin."""

NORM = 50.0
"""Length of a model, in lengths of the first one (at least 1), that honest training stays below."""


@dataclass(frozen=True)
class Plan:
    """What a run asks for, at most.

    ``steps`` has, for every question of the algorithm, how often it is asked in a round, at how
    many models, and with which local work; ``members`` the public keys of the sites by name.
    """

    run: str
    do: str
    config: Mapping[str, Any]
    privacy: str
    clients: int
    rounds: int
    steps: Mapping[str, Mapping[str, Any]]
    evaluations: int
    splits: tuple[str, ...]
    cap: float
    norm: float = NORM
    rounding: float = 0.0
    repeats: int = 0
    members: Mapping[str, str] = field(default_factory=dict)
    fit: Mapping[str, Any] = field(default_factory=dict)  # strengths of the candidates of a fit

    @property
    def seed(self) -> int:
        """The run's seed, from which minibatches follow."""
        return int(self.config["seed"])

    @cached_property
    def digest(self) -> str:
        """Identifies the plan."""
        return hashlib.sha256(self.encode()).hexdigest()

    def encode(self) -> bytes:
        """Return the bytes that are signed."""
        told = asdict(self)
        if not self.fit:  # as plans were written that know of none
            del told["fit"]
        return json.dumps(told, sort_keys=True).encode()

    def extends(self, other: Plan) -> bool:
        """Tell whether this plan is another one with more rounds."""
        counts = other.rounds, other.evaluations, other.repeats
        rounds, evaluations, repeats = counts
        same = replace(self, rounds=rounds, evaluations=evaluations, repeats=repeats)
        return same.encode() == other.encode() and self.rounds >= rounds

    def describe(self) -> list[str]:
        """Return the plan in words, for whoever answers for a site's data."""
        return list(_describe(self))


def find_other(own: Any, told: Any, where: str = "") -> str:
    """Return the setting in which two tables differ; nothing where they are equal.

    >>> find_other({"data": {"target": "ill"}}, {"data": {"target": "age"}})
    "data.target is 'age' there and 'ill' here"
    """
    if isinstance(own, Mapping) and isinstance(told, Mapping):
        parts = ((own.get(k), told.get(k), f"{where}.{k}" if where else k) for k in {**own, **told})
        return next(filter(None, (find_other(*part) for part in parts)), "")
    return "" if own == told else f"{where} is {told!r:.60} there and {own!r:.60} here"


# -- signatures ------------------------------------------------------------------------------------


def sign_plan(plan: Plan, private: Any = None) -> dict[str, str]:
    """Return a plan as it is sent, signed if there is a key."""
    told = {"text": plan.encode().decode(), "signature": ""}
    return told if private is None else {**told, "signature": sign(private, PURPOSE, plan.encode())}


def pack_plan(told: Mapping[str, str]) -> str:
    """Return a signed plan as one word, for a run's settings.

    >>> unpack_plan(pack_plan({"text": "{}", "signature": "00"}))
    {'text': '{}', 'signature': '00'}
    """
    return base64.urlsafe_b64encode(json.dumps(dict(told)).encode()).decode()


def unpack_plan(word: str) -> dict[str, str]:
    """Read what :func:`pack_plan` wrote."""
    try:
        told = json.loads(base64.urlsafe_b64decode(word.encode()))
        return {"text": str(told["text"]), "signature": str(told["signature"])}
    except (ValueError, KeyError, TypeError):
        raise KeyProblem(
            "the setting 'plan' is none; start runs with: equifed flower run"
        ) from None


# -- in words --------------------------------------------------------------------------------------


def _describe(plan: Plan) -> Iterator[str]:
    algorithm, model = plan.config["algorithm"], plan.config["model"]
    yield f"run {plan.run}: {plan.do}, {plan.rounds} rounds, at least {plan.clients} sites"
    if plan.fit:
        l2, own = (", ".join(f"{v:g}" for v in plan.fit[key]) for key in ("l2", "own_l2"))
        yield f"fit: {plan.rounds} rounds of all candidates together, in place of the algorithm"
        yield f"candidates: linear models with l2 {l2}; own_l2 none, {own}; average and fair"
        yield "test rows are measured after the choice, and no candidate is solved after that"
    objective = algorithm.get("objective", {})
    about = f", objective {objective['name']}" if objective else ""
    yield f"algorithm {algorithm['name']}{about}; model {model['name']}; data {plan.config['data']}"
    what = (
        "sums alone of gradients and updates, losses in clear"
        if plan.privacy == "secure"
        else ("every gradient and update of this site, in clear")
    )
    yield f"privacy {plan.privacy}: the server sees {what}"
    per_round = sum(
        int(s["times"]) for n, s in plan.steps.items() if n.startswith(("losses", "gradient"))
    )
    rounded = f", rounded to multiples of {plan.rounding:g}" if plan.rounding else ", not rounded"
    yield f"losses of training rows: {per_round} a round, {per_round * plan.rounds} in all{rounded}"
    measured = ", ".join(plan.splits) or "no"
    yield f"measured on {measured} rows, {plan.evaluations} times at most"
    if plan.privacy == "secure":
        yield f"no site has more than {plan.cap:.3g} of a hidden sum, none has fewer than 3 members"
    for name, step in sorted(plan.steps.items()):
        when = "in a round" if re.match(ROUND, name) else "in the run"
        yield f"{when}: {name.removeprefix('once ')}, {count(step['times'])}"
    yield f"models up to {plan.norm:g} lengths of the first; {plan.repeats} steps may be repeated"
    who = ", ".join(sorted(plan.members)) or "any site that the host admits"
    yield f"who takes part: {who}"
    if plan.privacy == "secure" and not plan.members:
        yield "WARNING: the plan lists no keys, so the server could play the other members"


def count(times: int) -> str:
    """Say how often in words.

    >>> count(1), count(3)
    ('once', 'up to 3 times')
    """
    return "once" if times == 1 else f"up to {times} times"


def read_plan(text: str) -> Plan:
    """Read the bytes that were signed, or raise :class:`KeyProblem`."""
    try:
        told = json.loads(text)
        plan = Plan(**{**told, "splits": tuple(told["splits"])})
        numbers = plan.rounds, plan.evaluations, plan.repeats, plan.clients, plan.seed
        floats = float(plan.cap), float(plan.norm), float(plan.rounding)
        if min(numbers) < 0 or not all(map(math.isfinite, floats)):
            raise ValueError
        if not re.fullmatch(r"[0-9a-f]{16}", plan.run) or plan.encode() != text.encode():
            raise ValueError
        _ = [(int(s["times"]), int(s["models"])) for s in plan.steps.values()], plan.describe()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise KeyProblem("the plan of the run cannot be read") from None
    return plan

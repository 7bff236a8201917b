"""What a run is going to ask of a site, signed by its operator before anything is asked.

A *question* is what an answer depends on: the same one may be asked again at will, because its
answer tells nothing new. A plan says of every step of the algorithm how many different ones there
are in a round, and at how many models. ``rehearsal`` finds that out; ``account`` holds a site's
requests against it.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from equifed.flower.memory import Memory, refuse_if
from equifed.flower.wire import Request, digest_model, find_round
from equifed.training.keys import KeyProblem, sign

PURPOSE = "plan"
ROUND = "losses|gradient|local|sum|opened|norms|curvature|recall"  # how names of its steps begin
NORM = (
    50.0  # length of a model, in lengths of the first (at least 1), that honest training keeps to
)


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

    @property
    def limits(self) -> dict[str, Mapping[str, Any]]:
        """The steps, measurements among them."""
        measured = {"metrics": {"times": self.evaluations, "models": self.evaluations}}
        return {**(measured if self.evaluations else {}), **self.steps}

    @cached_property
    def digest(self) -> str:
        """Identifies the plan."""
        return hashlib.sha256(self.encode()).hexdigest()

    def check_model(self, what: str, length: float, first: float) -> None:
        """Refuse a model that is longer than honest training makes it."""
        most = self.norm * max(1.0, first)
        told = f"{what} has length {length:.3g}, the plan's bound is {most:.3g}"
        cure = "raise largest-model in [tool.flwr.app.config] and sign again"
        refuse_if({f"{told}; if the data ask for more, {cure}": not length <= most})

    def encode(self) -> bytes:
        """Return the bytes that are signed."""
        told = {name: value for name, value in asdict(self).items() if value or name != "fit"}
        return json.dumps(told, sort_keys=True).encode()

    def extends(self, other: Plan) -> bool:
        """Tell whether this plan is another one with more rounds."""
        counts = {name: getattr(other, name) for name in ("rounds", "evaluations", "repeats")}
        return replace(self, **counts).encode() == other.encode() and self.rounds >= other.rounds

    def describe(self) -> list[str]:
        """Return the plan in words, for whoever answers for a site's data."""
        config, secure, fit = self.config, self.privacy == "secure", [""]
        objective = config["algorithm"].get("objective")
        about = f", objective {objective['name']}" if objective else ""
        clear = "every gradient and update of this site, in clear"
        seen = "sums alone of gradients and updates, losses in clear" if secure else clear
        losses = [s for name, s in self.steps.items() if name.startswith(("losses", "gradient"))]
        times = sum(int(step["times"]) for step in losses)
        rounded = f"rounded to multiples of {self.rounding:g}" if self.rounding else "not rounded"
        if self.fit:
            l2, own = (", ".join(f"{v:g}" for v in self.fit[key]) for key in ("l2", "own_l2"))
            fit = [
                f"fit: {self.rounds} rounds of all candidates together, in place of the algorithm",
                f"candidates: linear models with l2 {l2}; own_l2 none, {own}; average and fair",
                "test rows are measured after the choice, and no candidate is solved after that",
            ]
        told = [
            f"run {self.run}: {self.do}, {self.rounds} rounds, at least {self.clients} sites",
            *fit,
            f"algorithm {config['algorithm']['name']}{about}; model {config['model']['name']}; "
            f"data {config['data']}",
            f"privacy {self.privacy}: the server sees {seen}",
            f"losses of training rows: {times} a round, {times * self.rounds} in all, {rounded}",
            f"measured on {', '.join(self.splits) or 'no'} rows, {self.evaluations} times at most",
            f"no site has more than {self.cap:.3g} of a hidden sum, none has fewer than 3 members"
            if secure
            else "",
            *(
                _describe_step(name, int(step["times"]))
                for name, step in sorted(self.steps.items())
            ),
            f"models up to {self.norm:g} lengths of the first; {self.repeats} steps may be "
            "repeated",
            f"who takes part: {', '.join(sorted(self.members)) or 'any site that the host admits'}",
            "WARNING: the plan lists no keys, so the server could play the other members"
            if secure and not self.members
            else "",
        ]
        return [line for line in told if line]


def _describe_step(name: str, times: int) -> str:
    when = "in a round" if re.match(ROUND, name) else "in the run"
    often = "once" if times == 1 else f"up to {times} times"
    return f"{when}: {name.removeprefix('once ')}, {often}"


def sign_plan(plan: Plan, private: Any = None) -> dict[str, str]:
    """Return a plan as it is sent, signed if there is a key."""
    text = plan.encode()
    signature = "" if private is None else sign(private, PURPOSE, text)
    return {"text": text.decode(), "signature": signature}


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
        return {name: str(told[name]) for name in ("text", "signature")}
    except (ValueError, KeyError, TypeError):
        raise KeyProblem(
            "the setting 'plan' is none; start runs with: equifed flower run"
        ) from None


def read_plan(text: str) -> Plan:
    """Read the bytes that were signed, or raise :class:`KeyProblem`."""
    try:
        told = json.loads(text)
        plan = Plan(**{**told, "splits": tuple(told["splits"])})
        counts = plan.rounds, plan.evaluations, plan.repeats, plan.clients, plan.seed
        bounds = float(plan.cap), float(plan.norm), float(plan.rounding)
        named = re.fullmatch(r"[0-9a-f]{16}", plan.run) and plan.encode() == text.encode()
        if min(counts) < 0 or not all(map(math.isfinite, bounds)) or not named:
            raise ValueError
        _ = [(int(s["times"]), int(s["models"])) for s in plan.steps.values()], plan.describe()
    except (ValueError, KeyError, TypeError, AttributeError):
        raise KeyProblem("the plan of the run cannot be read") from None
    return plan


# -- what a request asks ---------------------------------------------------------------------------

ONCE = ("prepare", "metrics", "statistics", "deliver", "bounds")  # belong to no round
KEYED = ("sum", "norms")  # are about vectors that a client keeps
# steps of a hidden sum, and vectors that were shown before
UNCOUNTED = ("hello", "keys", "shares", "boxes", "unmask", "recall")
# what no answer depends on, or is held against the plan in another way
WITHOUT = ("mask", "pins", "late", "start", "files", "sha256")
ALONE = ("slope", "control")  # what members of a sum are told apart from the others


class Question(NamedTuple):
    """One question: the step of the algorithm, the round (0: none), and what its answer is of."""

    step: str
    scope: int
    digest: str
    model: str


def list_questions(request: Request, memory: Memory) -> list[Question]:
    """Return the questions of a request: that of its operation, and that of a sum made with it."""
    op, args, address = request.op, request.args, request.args.get("address", [])
    if op in UNCOUNTED:
        return []
    model, scope = digest_sent(request), find_round(address)
    step, about = f"{op} {_name_place(list(map(str, address)))}", list[Any]([model])
    if op in KEYED:
        key, old = str(args["key"]), str(args.get("minus", ""))
        model, scope, _ = memory.trace(key)
        tag, _, kind = key.rpartition("/")
        step = f"{op} {_name_place(tag.rpartition('#')[0].split('/'))} {kind}"
        about = [model, scope, memory.trace(old)]
    if op in ONCE:
        step, scope = f"prepare {args['asked']['stage']}" if op == "prepare" else op, 0
    elif scope == 0:
        step = f"once {step}".strip()
    asked = Question(step, scope, _digest([step, about, *_name_told(request)]), model)
    if "mask" not in args or op == "prepare":
        return [asked]
    part = step.rpartition(" ")[2] if op == "sum" else args["mask"]["part"] if op == "local" else op
    row = _digest([asked.digest, args["mask"]["weights"]])
    opened = Question(f"{'' if scope else 'once '}opened {part}", scope, row, model)
    return [opened] if op == "sum" else [asked, opened]


def tally(account: dict[str, Any], asked: Question) -> dict[str, int]:
    """Add a question to an account; return how often its step was asked, at how many models."""
    answered = account.setdefault(asked.step, {}).setdefault(str(asked.scope), {})
    answered[asked.digest] = asked.model
    return {"times": len(answered), "models": len(set(answered.values()))}


def name_common(request: Request) -> str:
    """Name what all members of a sum are told alike: it enters the masks, which stay otherwise."""
    return _digest([request.op, *_name_told(request, ALONE)])


def digest_sent(request: Request, name: str = "x") -> str:
    """Return the digest of an array of a request, by default its model; "" if it has none."""
    array = request.arrays.get(name)
    return "" if array is None else digest_model(np.asarray(array).tobytes())


def _name_told(request: Request, without: Sequence[str] = ()) -> list[dict[str, Any]]:
    told = {k: v for k, v in request.args.items() if k not in (*WITHOUT, *without)}
    return [told, {k: digest_sent(request, k) for k in request.arrays if k not in without}]


def _name_place(address: Sequence[str]) -> str:
    """Return an address without its round, and with a sign in place of other numbers.

    >>> _name_place(["round", "3", "steps", "try", "2", "local"])
    'steps try # local'
    """
    words = address[2:] if address[:1] == ["round"] else address
    return " ".join("#" if re.fullmatch(r"-?\d+", word) else word for word in words)


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]

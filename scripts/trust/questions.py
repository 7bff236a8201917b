"""What somebody who submits a run, or runs the server, gets out of sites by asking.

Two parts, in memory, with the embedded data of four hospitals and sites whose policy lists one
operator:

* attacks by a stranger and by a server that departs from a signed plan: what a site says that
  answers anybody, as all did before plans were signed, and what one says that lists an operator,
  which must refuse by name;
* what a server gets that keeps to a signed plan of 60 rounds and *chooses its models*: a gradient
  and a patient's row, at each level of privacy and for some roundings of losses.

Run it with ``python -m scripts.trust.questions`` (``--measure`` for the second part, too); it exits
with 1 if an attack is answered.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from flwr.app import Message
from numpy.typing import NDArray
from tests.flower.grid import MemoryGrid, memory_grid

from equifed.contract.local import LocalSGD
from equifed.data.federation import Federation
from equifed.flower.app_config import AppConfig, FederationSettings
from equifed.flower.plan import Plan, sign_plan
from equifed.flower.rehearsal import make_plan
from equifed.flower.secure.session import Published, from_fixed, from_hex, open_sum
from equifed.flower.wire import VERBS, Reply, Request
from equifed.runs.build import load_data
from equifed.training.keys import public_of

ROUNDS = 60
VICTIM = 0
APP: dict[str, Any] = {
    "rounds": ROUNDS,
    "data": {"name": "heart-disease"},
    "model": {"name": "logistic", "l2": 0.001, "dtype": "float64"},
    "evaluate": {"every": 5},
    "algorithm": {
        "name": "scaff-pd",
        "objective": {"name": "chi-square", "rho": 0.1, "scale": 1.0},
        "local": {"lr": 0.05, "steps": 20},
        "steps": {"name": "constant", "primal": 0.4, "dual": 0.1},
    },
}
BUDGET = "[budget]\nepsilon = 3.0\nrows = 4.0\nloss = 3.0\n"
OPERATOR, STRANGER = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
Vector = NDArray[np.float64]


@dataclass
class Server:
    """A server that sends sites whatever it likes, and the sites."""

    grid: MemoryGrid
    plan: Plan
    federation: Federation
    memory: Path
    anybody: bool = False
    evaluations: int = 1000
    told: dict[str, str] = field(default_factory=dict)
    asked: int = 0
    answered: int = 0

    @property
    def sites(self) -> range:
        """Positions of the sites."""
        return range(len(self.grid.apps))

    def ask(
        self,
        op: str,
        args: dict[str, Any],
        x: Vector | None = None,
        at: int = VICTIM,
        **arrays: Any,
    ) -> Reply:
        """Send one request to one site and return its reply."""
        given = arrays if x is None else {"x": x, **arrays}
        named = "/".join(str(word) for word in args.get("address", [op])) + "#0"
        tag = str(args.pop("tag", named))
        return self.send(Request(op, self.plan.run, tag, at, args, given), at)

    def send(self, request: Request, at: int) -> Reply:
        """Send a request to a site and return its reply."""
        node = next(n for n, c in self.grid.contexts.items() if c.node_config["partition-id"] == at)
        message = Message(request.to_records(), node, VERBS[request.op].message)
        (sent,) = self.grid.push_messages([message])
        (reply,) = self.grid.pull_messages([sent])
        return Reply.from_records(reply.content)

    def greet(self, told: dict[str, str] | None) -> Reply:
        """Say hello with a plan to all sites; return what the victim answers.

        Where anybody may ask, no plan is shown, which would bind the server.
        """
        self.told = told or {}
        args = {"plan": told} if told and not self.anybody else {}
        return [self.ask("hello", args, at=i) for i in self.sites][VICTIM]

    def gradient(self, x: Vector, round: int, at: int = VICTIM, **more: Any) -> Reply:
        """Ask for loss and gradient at a model, as a round of the plan does."""
        address = ["round", round, "gradient"]
        args = {"seed": self.plan.seed, "address": address, "round": round, "batch_size": None}
        return self.ask("gradient", {**args, "give": self.plan.privacy == "none", **more}, x, at)

    def loss(self, x: Vector, round: int) -> float:
        """Return the victim's loss at a model, for the price of a round."""
        reply = self.gradient(x, round)
        self.asked, self.answered = self.asked + 1, self.answered + (not reply.error)
        return float(reply.numbers.get("loss", np.nan))

    @property
    def size(self) -> int:
        """Numbers in a model: two rows of weights and two intercepts."""
        return 2 * (self.features + 1)

    @property
    def features(self) -> int:
        """Columns of the data."""
        return int(self.federation.input_shape[0])


@contextmanager
def serve(
    privacy: str = "secure", rounding: float = 0.0, anybody: bool = False, policy: str = "",
    **changes: Any,
) -> Iterator[Server]:  # fmt: skip
    """Set up sites with an operator in their policy, and a server with a plan for them.

    Sites that answer ``anybody`` list none, and are started with ``--any-operator``; ``policy`` is
    what else their policies say.
    """
    app = {**APP, "guard": {"mode": "on", "rounding": rounding}, **changes}
    config = AppConfig.from_dict(app)
    federation = load_data(config.data)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        public = public_of(OPERATOR, "anna")
        listed = "" if anybody else f'operators = ["{public.line} anna"]\n'
        (root / "policy.toml").write_text(listed + policy)
        path = str(root / "policy.toml")
        grid = memory_grid(federation, config.build_task(), root / "memory", policy=path)
        plan = make_plan(config, FederationSettings(4, privacy=privacy))  # type: ignore[arg-type]
        yield Server(grid, plan, federation, root / "memory", anybody)


def agree(server: Server) -> Vector:
    """Let the sites agree to the operator's plan; return the first model."""
    reply = server.greet(sign_plan(server.plan, OPERATOR))
    assert not reply.error, reply.text
    return np.zeros(server.size)


def open_epoch(server: Server, x: Vector) -> dict[str, Any]:
    """Take the first steps of a hidden sum with all four sites; return its table.

    ``x`` is the model of all, or has one row for each.
    """
    table, everybody = {"name": "epoch", "slots": 2}, server.sites
    for i, row in zip(everybody, np.broadcast_to(x, (len(everybody), server.size)), strict=True):
        server.gradient(row, 1, at=i)
    keys = {str(i): server.ask("keys", {"mask": table}, at=i).numbers for i in everybody}
    shares = {
        i: server.ask("shares", {"mask": {**table, "parties": keys}}, at=i).numbers
        for i in everybody
    }
    for i in everybody:
        told = {str(j): n for j, n in shares.items() if j != i}
        boxes = {
            kind: {j: n[kind][str(i)] for j, n in told.items()} for kind in ("boxes", "digests")
        }
        server.ask("boxes", {"mask": {**table, **boxes}}, at=i)
    return {**table, "slot": 0, "part": "vector", "parties": keys}


def read_sum(server: Server, x: Vector) -> Vector:
    """Return what a server reads out of a hidden sum of the sites' gradients, with equal weights.

    ``x`` is the model of all, or has one row for each.
    """
    agree(server)
    table, everybody = open_epoch(server, x), server.sites
    mask = {**table, "weights": {str(i): 1 / len(everybody) for i in everybody}}
    args = {"key": "round/1/gradient#0/gradient", "mask": mask, "address": ["sum"], "round": 0}
    masked = {i: server.ask("sum", dict(args), at=i).arrays["masked"] for i in everybody}
    shares = {
        i: from_hex(server.ask("unmask", {"mask": mask}, at=i).numbers["shares"], dict)
        for i in everybody
    }
    parties = {int(i): Published.from_dict(keys) for i, keys in table["parties"].items()}
    return np.asarray(from_fixed(open_sum(masked, shares, 0, parties)))


def ask_sum(server: Server, weights: dict[str, float]) -> Reply:
    """Ask the victim for its part of a sum of gradients with these weights."""
    table = open_epoch(server, agree(server))
    mask = {**table, "weights": weights}
    args = {"key": "round/1/gradient#0/gradient", "mask": mask, "address": ["sum"], "round": 0}
    return server.ask("sum", args)


# -- attacks: each returns what the site said last -------------------------------------------------

Attack = Callable[[Server], Reply]


def stranger_without_plan(server: Server) -> Reply:
    """Bring no plan."""
    return server.greet(None)


def stranger_signs(server: Server) -> Reply:
    """Let a stranger sign the plan."""
    return server.greet(sign_plan(server.plan, STRANGER))


def stranger_skips_hello(server: Server) -> Reply:
    """Ask without a hello."""
    return server.gradient(np.zeros(server.size), 1)


def plan_changed(server: Server) -> Reply:
    """Put the operator's signature under another number of rounds."""
    told = sign_plan(server.plan, OPERATOR)
    return server.greet({**told, "text": replace(server.plan, rounds=1000).encode().decode()})


def plan_changed_after_approval(server: Server) -> Reply:
    """Sign a second plan under the name of a run that was agreed to."""
    agree(server)
    return server.greet(sign_plan(replace(server.plan, norm=1e9), OPERATOR))


def finite_differences(server: Server) -> Reply:
    """Ask for losses at two models in one step."""
    x = agree(server)
    server.gradient(x, 1)
    return server.gradient(x + 1e-5, 1)


def many_evaluations(server: Server) -> Reply:
    """Measure a thousand models."""
    x, args = agree(server), {"splits": ["test"], "metrics": [], "describe": False}
    replies = [server.ask("metrics", args, x + 1e-5 * k) for k in range(server.evaluations)]
    answered = sum(not reply.error for reply in replies)
    assert answered == (server.evaluations if server.anybody else server.plan.evaluations)
    return replies[-1]


def training_rows_measured(server: Server) -> Reply:
    """Measure training rows, where sums are hidden."""
    x, args = agree(server), {"splits": ["train"], "metrics": [], "describe": False}
    return server.ask("metrics", args, x)


def more_rounds(server: Server) -> Reply:
    """Play a round after the last one."""
    return server.gradient(agree(server), ROUNDS + 1)


def one_row_batches(server: Server) -> Reply:
    """Ask for the loss of a minibatch of one row."""
    return server.gradient(agree(server), 1, batch_size=1)


def other_seed(server: Server) -> Reply:
    """Choose the seed of minibatches."""
    return server.gradient(agree(server), 1, seed=7)


def older_round(server: Server) -> Reply:
    """Send another model in a round that is over."""
    x = agree(server)
    for r in (1, 3):
        server.gradient(x + r, r)
    return server.gradient(x + 2, 2)


def far_model(server: Server) -> Reply:
    """Scale a model so that one row has all of the loss."""
    return server.gradient(agree(server) + 1e3, 1)


def unplanned_verb(server: Server) -> Reply:
    """Ask what the algorithm never asks."""
    x, args = agree(server), {"address": ["round", 1, "losses"], "round": 1, "batch_size": None}
    return server.ask("losses", {**args, "seed": server.plan.seed}, x)


def vector_in_clear(server: Server) -> Reply:
    """Ask for a gradient in clear, where sums are hidden."""
    return server.gradient(agree(server), 1, give=True)


def lonely_sum(server: Server) -> Reply:
    """Open a hidden sum with weights 1 and 2^-60."""
    return ask_sum(server, {"0": 1.0, "1": 2.0**-60, "2": 2.0**-60, "3": 2.0**-60})


def sum_of_two(server: Server) -> Reply:
    """Open a hidden sum of two members."""
    return ask_sum(server, {"0": 0.5, "1": 0.5, "2": 0.0, "3": 0.0})


def lie_about_weights(server: Server) -> Reply:
    """Tell one site of other parties."""
    return ask_sum(server, {"0": 0.5, "1": 0.5, "7": 0.5})


def other_position(server: Server) -> Reply:
    """Ask as if the site were another client, whose minibatches are others."""
    x = agree(server)
    server.gradient(x, 1)
    address = ["round", 1, "gradient"]
    args = {"seed": server.plan.seed, "address": address, "round": 1, "batch_size": None}
    args["give"] = False
    request = Request("gradient", server.plan.run, "round/1/gradient#0", 3, args, {"x": x})
    return server.send(request, VICTIM)


def other_name(server: Server) -> Reply:
    """Keep a gradient under the name of another round's."""
    return server.gradient(agree(server), 1, tag="round/2/gradient#0")


def other_round(server: Server) -> Reply:
    """Say another round than the question's."""
    return server.gradient(agree(server), 1, address=["round", 2, "gradient"])


def other_start(server: Server) -> Reply:
    """Choose the seed of own parts."""
    return server.gradient(agree(server), 1, start=[7, "initial"])


def steered_away(server: Server) -> Reply:
    """Lead local steps to a far model from a short one."""
    x, work = agree(server), LocalSGD(lr=0.05, steps=20).work().to_dict()
    address = ["round", 1, "local"]
    args = {"seed": server.plan.seed, "address": address, "round": 1, "work": work}
    args |= {"control": None, "slope": None, "give": False}
    return server.ask("local", args, x, control=x + 1e6, target=x)


def unmask_others(server: Server) -> Reply:
    """Open a sum of the others, while the victim's vector is still under way."""
    table = {**open_epoch(server, agree(server)), "weights": dict.fromkeys("0123", 0.25)}
    return server.ask("unmask", {"mask": table, "address": ["unmask"]})


def deleted_account(server: Server) -> Reply:
    """Use a plan again, after a site deleted what it knew of the run."""
    x = agree(server)
    server.gradient(x, 1)
    for folder in server.memory.iterdir():
        if folder.name != "plans":
            shutil.rmtree(folder)
    return server.greet(server.told)


@dataclass(frozen=True)
class Refusal:
    """What a site must say to an attack, what refuses it there, what a signed server still gets."""

    message: str
    where: str
    left: str = "nothing"


NOBODY = "not signed by an operator listed in this site's policy"
ATTACKS: dict[Attack, Refusal] = {
    stranger_without_plan: Refusal("this site answers only signed runs", "hello", "its plan"),
    stranger_signs: Refusal(NOBODY, "hello", "its plan"),
    stranger_skips_hello: Refusal("no plan of this run was agreed to", "account", "its plan"),
    plan_changed: Refusal(NOBODY, "hello", "more rounds, signed again"),
    plan_changed_after_approval: Refusal(
        "was changed after the site had agreed", "hello", "more rounds, signed again"
    ),
    finite_differences: Refusal(
        "a second model in 'gradient gradient', round 1", "account", "one model per round: below"
    ),
    many_evaluations: Refusal("models in 'metrics', the plan has", "account", "16 measurements"),
    training_rows_measured: Refusal("the plan measures nothing on or by 'train'", "account"),
    more_rounds: Refusal("round 61 is asked about, the plan has 60", "account", "60 rounds"),
    one_row_batches: Refusal("the request has minibatches of 1", "account", "the plan's size"),
    other_seed: Refusal("drawn by another seed than the plan's", "account", "the plan's seed"),
    older_round: Refusal("of round 2 after round 3 had begun", "account", "rounds in order"),
    far_model: Refusal("the plan's bound is 50", "model", "models up to the bound: below"),
    unplanned_verb: Refusal("the plan of this run has no 'losses losses'", "account"),
    vector_in_clear: Refusal("the plan allows only sums", "account", "sums"),
    lonely_sum: Refusal(
        "client 0 has 1 of the weights of a sum, the cap is 0.5", "masks", "up to the cap"
    ),
    sum_of_two: Refusal("a sum of 2 members hides too little", "masks", "sums of three or more"),
    lie_about_weights: Refusal("not those of all its parties", "masks", "noise"),
    other_position: Refusal("this site is client 0 of the run, not 3", "account"),
    other_name: Refusal("a request of 'round/1/gradient' is named 'round/2/gradient#0'", "account"),
    other_round: Refusal("a request of round 2 is said to be of 1", "account"),
    other_start: Refusal("own parts are drawn by another seed than the plan's", "account"),
    steered_away: Refusal(
        "the correction of local steps has length", "model", "steps up to the bound"
    ),
    unmask_others: Refusal("no vector of this client is in this sum", "masks"),
    deleted_account: Refusal("deleted what it knew of this run", "hello"),
}
"""Attacks, and what comes of them."""


def run_attack(attack: Attack, anybody: bool = False) -> Reply:
    """Return what the victim says to an attack."""
    with serve(anybody=anybody) as server:
        return attack(server)


def shorten(reply: Reply) -> str:
    """Return in a few words what a site said."""
    told = reply.text.partition(";")[0].removesuffix(" at this site")
    return f"`{told}`" if reply.error else "answered"


# -- what a server that keeps to the plan gets -----------------------------------------------------


def measure_gradient(server: Server, step: float) -> tuple[int, float]:
    """Return losses used, and the relative error of a gradient from differences of losses."""
    x = agree(server)
    rng = np.random.default_rng(0)
    x = x + 0.1 * rng.normal(size=x.shape)
    base, found = server.loss(x, 1), np.zeros(server.size)
    for k in range(server.size):
        found[k] = (server.loss(x + step * np.eye(server.size)[k], 2 + k) - base) / step
    truth = true_gradient(server, x)
    return server.answered, float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def average_gradients(server: Server) -> float:
    """Return the relative error of the mean of all gradients that are sent, at one model."""
    x = agree(server)
    replies = [server.gradient(x, 1 + k) for k in range(ROUNDS)]
    found = np.mean([r.arrays["gradient"] for r in replies if not r.error], axis=0)
    truth = true_gradient(server, x)
    return float(np.linalg.norm(found - truth) / np.linalg.norm(truth))


def true_gradient(server: Server, x: Vector, site: int = VICTIM) -> Vector:
    """Return a site's gradient, in two rows of weights and two intercepts."""
    inputs, labels = rows_of(server, site)
    weights, biases = x[: 2 * server.features].reshape(2, -1), x[2 * server.features :]
    scores = inputs @ weights.T + biases
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    errors = (shares - np.eye(2)[labels]) / len(labels)
    whole = np.concatenate([(errors.T @ inputs).ravel(), errors.sum(axis=0)])
    penalty = 0.001 * np.concatenate([x[: 2 * server.features], x[2 * server.features :]])
    return np.asarray(whole + penalty)


def rows_of(server: Server, site: int = VICTIM) -> tuple[Vector, NDArray[np.int64]]:
    """Return a site's training rows."""
    train = server.federation.subset([site]).train
    return train.inputs.astype(np.float64), train.targets.astype(np.int64)


def measure_row(server: Server, length: float) -> tuple[int, float]:
    """Return losses used, and how far the row that they give is from a true one.

    Where the intercept is far below zero the loss is a plane; what is above the plane when the
    intercept rises belongs to one row at first, and its slopes are the row. The distance is in
    those of the victim's median row from the true one.
    """
    agree(server)
    f, (inputs, _) = server.features, rows_of(server)
    w = np.random.default_rng(1).normal(size=f)
    w *= length / np.linalg.norm(w)
    r, far, wide, ones = 0, -62.0, 1.0, np.eye(f)

    def ask(w: Vector, b: float) -> float:
        nonlocal r
        r += 1
        model = np.concatenate([-w / 2, w / 2, [-b / 2, b / 2]])
        return server.loss(model, r) - 0.0005 * float(model @ model)

    base = ask(w, far)
    slopes = np.array([(ask(w + wide * ones[k], far) - base) / wide for k in range(f)])
    fall = (ask(w, far - 1.0) - base) / -1.0
    above = lambda w2, b: ask(w2, b) - base - slopes @ (w2 - w) - fall * (b - far)  # noqa: E731
    wanted = max(1e-4, 8 * server.plan.rounding)
    low, high = far, -far
    for _ in range(ROUNDS - 2 * f - 4):
        middle = (low + high) / 2
        low, high = (low, middle) if above(w, middle) > wanted else (middle, high)
    h = 1e-3 if not server.plan.rounding else 1.0
    start = above(w, high)
    one = (above(w, high + h) - start) / h
    found = np.array([(above(w + h * ones[k], high) - start) / h for k in range(f)])
    return server.answered, measure_guess(inputs, found / one) if one else float("inf")


def measure_guess(inputs: Vector, guess: Vector) -> float:
    """Return how far a guess is from the nearest row, in distances of the median row from that."""
    distances = np.linalg.norm(inputs - guess, axis=1)
    nearest = int(distances.argmin())
    return float(distances[nearest] / np.median(np.linalg.norm(inputs - inputs[nearest], axis=1)))


def guess_blindly(server: Server) -> float:
    """Return the same of a guess that asks nothing: the mean of all hospitals, which is zero."""
    return measure_guess(rows_of(server)[0], np.zeros(server.features))


def measure() -> None:
    """Print what a signed server that chooses its models gets."""
    print("| privacy | losses rounded to | losses used | error of a gradient | error of a row |")
    print("|---" * 5 + "|")
    for privacy, rounding in (("none", 0.0), ("secure", 0.0), ("secure", 1e-3), ("secure", 1e-2)):
        step = max(1e-5, rounding**0.5)
        with serve(privacy, rounding) as server:
            used, gradient = measure_gradient(server, step)
        rows = []
        for length in (6.0, 9.0, 12.0):
            with serve(privacy, rounding) as server:
                rows.append(measure_row(server, length)[1])
        rounded = f"{rounding:g}" if rounding else "not"
        print(f"| {privacy} | {rounded} | {used} | {gradient:.1e} | {min(rows):.1e} |", flush=True)
    for privacy in ("none", "secure"):
        changes: dict[str, Any] = {"policy": BUDGET, "evaluate": {"splits": []}}
        with serve(privacy, **changes) as server:
            used, gradient = measure_gradient(server, 1.0)
        if privacy == "none":
            with serve(privacy, **changes) as server:
                gradient = min(gradient, average_gradients(server))
        rows = []
        for length in (6.0, 9.0, 12.0):
            with serve(privacy, **changes) as server:
                rows.append(measure_row(server, length)[1])
        print(f"| {privacy} | epsilon 3 | {used} | {gradient:.1e} | {min(rows):.1e} |", flush=True)


def main() -> int:
    """Attack, and measure if that is asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--measure", action="store_true", help="what a signed server gets, too")
    args = parser.parse_args()
    wrong = 0
    print("| attack | before | now | refused by | a signed server gets |\n" + "|---" * 5 + "|")
    for attack, refusal in ATTACKS.items():
        before, now = run_attack(attack, anybody=True), run_attack(attack)
        good = now.error == "refused" and refusal.message in now.text
        wrong += not good
        told = shorten(now) if good else f"WRONG: {now.error} {now.text or now.numbers}"[:120]
        what = str(attack.__doc__).strip(".")
        line = what, shorten(before), told, refusal.where, refusal.left
        print(f"| {' | '.join(line)} |", flush=True)
    if args.measure:
        print()
        measure()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())

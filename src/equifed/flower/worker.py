"""A client at one request: the library's own local work on its data.

Every request is answered from the request, the data and the client's memory alone, and memory is
written at the end, so a request may be repeated at will.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from equifed.algorithms.guard_limits import round_losses
from equifed.contract.arrays import BlockMatrix
from equifed.contract.curvature import Inexactness
from equifed.contract.local import LocalWork, own_strength
from equifed.contract.streams import Stream
from equifed.data.federation import Federation
from equifed.data.fit_by_sums import find_names, to_vector
from equifed.data.preparation import Preparation
from equifed.data.split import DataError
from equifed.engines.base import OwnRows
from equifed.engines.ordered_sums import DenseVectors
from equifed.flower.account import Account, accept_plan, list_questions, name_common
from equifed.flower.budget import FREE, MOMENTS, PAID, TABLE, Refused, refuse
from equifed.flower.memory import Memory, digest, keep_delivery, slug
from equifed.flower.participant import Client, Stale, find_far
from equifed.flower.secure.masking import Masking, Signer
from equifed.flower.site import SiteData
from equifed.flower.task import PACKAGES, OneClient, Schema
from equifed.flower.wire import (
    ALWAYS,
    PARTS,
    VERBS,
    Reply,
    Request,
    WireError,
    digest_model,
    expect_vector,
    pack_blocks,
    read_metric,
)
from equifed.metrics.metric import as_metrics
from equifed.models.curvature import known_curvature
from equifed.models.own_part import fit_new_client
from equifed.training.keys import PublicKey
from equifed.training.tables import package_versions


class Worker:
    """One client at one request."""

    def __init__(self, client: Client, request: Request) -> None:
        self.client, self.request, self.args = client, request, request.args
        self.task, self.policy = client.task, client.policy
        self.memory = Memory(client.root, request.run, client.name)
        self.round = int(self.args.get("round", 0))
        self.account: Account | None = None

    @cached_property
    def federation(self) -> Federation:
        """The client's samples."""
        return self.client.prepare(self.memory)

    @cached_property
    def engine(self) -> OneClient:
        """The library's own engine on these samples; under a budget one that adds noise."""
        client, budget = self.client, self.policy.budget
        if budget is not None and self.account is not None:
            given = self.account.plan, client.root, client.name
            return budget.build_engine(self.task, self.federation, *given)
        position, told = max(self.request.client, 0), self.args.get("candidate")
        return self.client.build_engine(self.federation, position, told)

    def answer(self) -> Reply:
        """Do what the request says."""
        op, verb, unusual = self.request.op, VERBS[self.request.op], list[str]()
        if op != "hello":
            self.account = Account.open(self.memory, self.policy)
        if self.account is not None:
            unusual = self._hold_against_plan(self.account)
        if verb.own_part:
            after = int(self.args.get("own_round", 0)) + 1
            self._bind_own_part(self.round if verb.own_part == "before" else after)
        if verb.masks:
            reply = self.request.reply(self._masking().take_step(op))
        elif self.policy.budget is None:
            reply = getattr(self, op)()
        else:
            reply = self._answer_with_noise(op)
        self.memory.tidy(self.round, [str(key) for key in self.args.get("pins", [])])
        return replace(reply, numbers={**reply.numbers, "unusual": unusual}) if unusual else reply

    def _answer_with_noise(self, op: str) -> Reply:
        """Answer under a budget: what was told before is told again, for nothing."""
        if op not in (*PAID, *FREE):
            refuse(op)
        if op == "bounds":
            return self.request.reply({})
        if op == "hello" and isinstance(self.client.data, SiteData):
            refuse(TABLE)
        if op in PAID:
            (asked, *_) = list_questions(self.request, self.memory)
            told = self.memory.read_record("told").get(asked.digest, {})
            found = {k: self.memory.get(f"{told['tag']}/{k}") for k in told.get("parts", ())}
            rows = {k: row for k, row in found.items() if row is not None}
            if len(rows) < len(found):
                raise Refused(
                    f"{asked.step!r:.80} was answered before, and the answer is no longer stored"
                )
            if told:
                parts = {k: DenseVectors(self._tensor(row)[None]) for k, row in rows.items()}
                return self._keep(told["numbers"], parts)
        return getattr(self, op)()  # type: ignore[no-any-return]

    def _hold_against_plan(self, account: Account) -> list[str]:
        """Refuse what the plan does not have; return what is unusual."""
        if "x" in self.request.arrays:
            first = self.client.measure_first(self.engine, account.plan.seed)
            account.check_model("the model", float(self._sent("x").double().norm()), first)
            for name in sorted({"target", "control"} & set(self.request.arrays)):
                work = LocalWork.from_dict(self.args["work"])
                way = work.lr * float(work.steps_for([self.client.sizes["train"]])[0])
                moved = way * float(self._sent(name).double().norm())
                account.check_model("the correction of local steps", moved, first)
        return account.admit(self.request)

    def _round_losses(self, losses: NDArray[Any]) -> float:
        """Return this client's loss as it may leave: rounded where sums are hidden."""
        plan = None if self.account is None else self.account.plan
        hidden = plan is not None and plan.privacy == "secure"
        losses = losses if self.policy.budget is None else np.maximum(losses, 0.0)
        return float(round_losses(losses, plan.rounding if plan and hidden else 0.0)[0])

    # -- before the first round -------------------------------------------------------------------

    def hello(self) -> Reply:
        """Say who this is, what data there are, and with which software.

        A table whose preparation is not known yet is described by its columns.
        """
        client, told = self.client, self.args.get("preparation")
        sent, keys = self.args.get("plan"), client.identity.peers
        given = self.policy, self.memory, client.root, client.name, client.sizes["train"]
        accept_plan(sent, *given, self.task.about, keys, self.request.run)
        about: dict[str, Any] = {
            "name": client.name,
            "partition": client.partition,
            "versions": package_versions(PACKAGES),
            "sizes": client.sizes,
        }
        notes, ready = self.policy.describe(), True
        if isinstance(client.data, SiteData):
            if told is not None:
                Preparation.from_json(told)  # refuses what is none
            about |= client.data.describe()
            ready, totals = bool(self._take_once("preparation")), self._take_once("totals")
            if self.policy.show_by_name:
                notes += find_far(client.data.table, totals)
        if ready:
            schema, model = Schema.of(self.federation), self.task.fingerprint(self.engine)
            about |= {"schema": schema.to_dict(), "model": model}
            about["noised"] = self.policy.budget is not None
        return self.request.reply(self._signer().sign("hello", {**about, "notes": notes}))

    def prepare(self) -> Reply:
        """Answer one question of the fit, in clear or under masks."""
        data, asked = self.client.data, self.args["asked"]
        if not isinstance(data, SiteData):
            raise WireError("this site gives no table")
        if asked["prepare"] != json.loads(json.dumps(asdict(data.settings.prepare))):
            raise DataError("the question is of another preparation than this site agreed to")
        named = asked["stage"] in ("names", "counts")
        answer = data.table.answer({**asked, "stage": "sums"} if named else asked)
        if asked["stage"] == "names":
            return self.request.reply({"names": find_names(asked, answer)})
        # Sums of a question's answers over nearly the same sites must not both be opened.
        (question,) = list_questions(self.request, self.memory)
        return self._give("vector", to_vector(asked, answer), "prepare", question.digest, 0, "")

    def statistics(self) -> Reply:
        """Return rows, labels and means, as far as the site shows them."""
        self.policy.check_plan({}, self.client.sizes["train"])
        return self.request.reply({"statistics": self.client.describe_rows()})

    # -- the verbs --------------------------------------------------------------------------------

    def losses(self) -> Reply:
        """Return f_i(x)."""
        losses = self.engine.losses(self._sent("x"), self._stream(), self.args["batch_size"])
        return self._keep({"loss": self._round_losses(losses)}, {})

    def gradient(self) -> Reply:
        """Return f_i(x), and keep the gradient or also send it."""
        losses, vectors = self.engine.value_and_gradient(
            self._sent("x"), self._stream(), self.args["batch_size"]
        )
        assert isinstance(vectors, DenseVectors)
        numbers: dict[str, Any] = {"loss": self._round_losses(losses)}
        found = self.engine.inexactness(self._sent("x"))
        if isinstance(found, Inexactness):  # own parts that are found numerically
            numbers["own_error"] = [float(found.losses[0]), float(found.gradients[0])]
        self._keep_own_part()
        return self._keep(numbers, {"gradient": vectors})

    def local(self) -> Reply:
        """Do local work, and keep or send what comes of it."""
        work = LocalWork.from_dict(self.args["work"]).work(scale=self._metric())
        self.policy.check_work(work, len(self.federation.train))
        slope, control = self.args["slope"], self._control()
        moved = self.engine.local_steps(
            self._sent("x"),
            work,
            self._stream(),
            control=control,
            target=None if control is None else self._sent("target"),
            slopes=None if slope is None else np.array([float(slope)]),
        )
        if self.account is not None and moved.displacement is not None:
            first = self.client.measure_first(self.engine, self.account.plan.seed)
            after = self._sent("x").double() - moved.displacement.weighted_sum(np.ones(1))
            self.account.check_model("the model after local steps", float(after.norm()), first)
        self._keep_own_part()
        numbers: dict[str, Any] = {"steps": int(moved.steps[0])}
        if moved.thresholds is not None:
            numbers["threshold"] = float(moved.thresholds[0])
        parts = {name: getattr(moved, name) for name in PARTS if getattr(moved, name) is not None}
        return self._keep(numbers, parts)

    def sum(self) -> Reply:
        """Return a kept vector times this client's weight, masked."""
        key = str(self.args["key"])
        vector = self._recall(key)
        if "minus" in self.args:
            vector = vector - self._recall(str(self.args["minus"]))
        kind = f"{'change of ' if 'minus' in self.args else ''}{key.rpartition('/')[2]}"
        return self._give("vector", vector, kind, *self.memory.trace(key))

    def curvature(self) -> Reply:
        """Return this client's second derivatives, or their product with a thin matrix, packed."""
        x, thin = self._sent("x"), None
        if self.policy.budget is not None:
            return self._tell_noised_curvature()
        if "thin" in self.request.arrays:
            thin = self._tensor(np.asarray(self.request.arrays["thin"]))
        form = self.args["form"]
        found = self.engine.curvature_sum(x, np.ones(1), form, thin)
        if isinstance(found, str):
            raise WireError(found)
        vector = pack_blocks(found.blocks, thin is not None and form == "blocks")
        packed, about = _array(vector.to(self.engine.model.dtype)), name_common(self.request)
        return self._give("curvature", packed, "curvature", self._model(), self.round, about)

    def _tell_noised_curvature(self) -> Reply:
        """Return a bound on one block of the Hessian from noised moments, without the penalty."""
        form = self.args["form"]
        if form != "mean" or "thin" in self.request.arrays or self.account is None:
            raise Refused(
                f"under a privacy budget curvature is sent as 'mean', not as {form!r:.20}"
            )
        site = self.engine.site(0)  # type: ignore[attr-defined]
        packed = _array(pack_blocks(site.hessian()[None], thin=False).to(self.engine.model.dtype))
        about = name_common(self.request)
        reply = self._give("curvature", packed, "curvature", MOMENTS, self.round, about)
        return replace(reply, numbers={"deviation": site.hessian_noise()})

    def bounds(self) -> Reply:
        """Return what is certain of this client's curvature, as a simulation of all finds it."""
        model, clients = self.engine.model, int(self.args["clients"])
        known = known_curvature(model, clients, self.engine.inputs_of, [0])
        if isinstance(known, str) or not np.isfinite(known.smoothness[0]):
            return self.request.reply({})
        least, largest = float(known.strong_convexity[0]), float(known.smoothness[0])
        told = {"smoothness": largest, "strong_convexity": least, "tight": known.tight}
        return self.request.reply(told)

    def norms(self) -> Reply:
        """Return the squared length of a kept vector."""
        vectors = DenseVectors(self._tensor(self._recall(str(self.args["key"])))[None])
        return self.request.reply({"norm": float(vectors.squared_norms(self._metric())[0])})

    def recall(self) -> Reply:
        """Return a kept vector in clear."""
        self.policy.allow_clear()
        return self.request.reply({}, {"vector": self._recall(str(self.args["key"]))})

    def metrics(self) -> Reply:
        """Return the metrics of every split, and what single samples say if that is asked."""
        numbers, asked, x = {}, as_metrics(self.args["metrics"]), self._sent("x")
        splits = self.args["splits"]
        for found in self.engine.evaluate(x, splits, asked):
            metrics = {name: float(values[0]) for name, values in found.metrics.items()}
            for name in {"loss", "mse"} & set(metrics):
                metrics[name] = self._round_losses(np.array([metrics[name]]))
            kept = {k: v for k, v in metrics.items() if k in ALWAYS or not np.isnan(v)}
            numbers[found.split] = {"size": int(found.sizes[0]), "metrics": kept}
        if not self.args["describe"]:
            return self.request.reply({"splits": numbers})
        told = self.engine.describe(x, splits[0], asked)
        own = None if told is None or told.clients[0] is None else told.clients[0].to_dict()
        return self.request.reply({"splits": numbers, "detail": own})

    def deliver(self) -> Reply:
        """Keep the model of a run that ended, with its card and this client's page."""
        x = self._sent("x")
        if digest(_array(x)) != self.args["sha256"]:
            raise WireError("the model was changed on its way")
        folder = self.client.results or self.client.root / "results" / slug(self.client.name)
        predictor = self.engine.predictor(x)
        if predictor.own:  # this site's model: with the own part that it has
            predictor = predictor.for_client(self.client.name)
        checksum = keep_delivery(folder, self.request.run, predictor, self.args)
        return self.request.reply({"checksum": checksum})

    # -- small parts ------------------------------------------------------------------------------

    def _bind_own_part(self, before: int) -> None:
        """Let the engine start from the own part of the last round before another one.

        A site that comes after the end has none, and no run to draw one for: it fits its own.
        """
        engine = self.engine
        if not engine.remembers_own():
            return
        kept = self.memory.own_before(before)
        if kept is None and "start" not in self.args:
            row = self._fit_own_part()[None]
        elif kept is None or kept.shape != (engine.model.own_size,):
            seed, *address = self.args["start"]
            engine.initial(Stream(int(seed), tuple(address)))  # draws the own part, too
            row = engine.own_rows.start
        else:
            row = engine.own_rows.start.new_tensor(kept)[None]
        engine.own_rows = OwnRows(row)

    def _keep_own_part(self) -> None:
        """Keep the own part for the next round, if it has moved in this one."""
        if self.engine.remembers_own() and self.engine.own_rows.after is not None:
            self.memory.keep_own(self.round, _array(self.engine.own_after()[0]))

    def _fit_own_part(self) -> torch.Tensor:
        """Return the best own part (p,) for the site's training samples at the shared part x."""
        x, train = self._sent("x"), self.federation.train
        told, names = self.engine.predictor(x), tuple(self.engine.model.own_shapes)
        try:
            module = fit_new_client(
                told.module,
                names,
                lambda m: torch.as_tensor(told.run_module(m, train.inputs)),
                torch.as_tensor(train.targets),
                told.loss,
                own_strength(told.own_l2, len(train.targets)),
            )
        except ValueError as error:  # our own words, about parameters and settings
            raise WireError(f"no own part can be fitted here: {error}") from error
        return torch.cat([module.get_parameter(n).detach().reshape(-1) for n in names]).to(x)

    def _take_once(self, what: str) -> Any:
        """Return what was said with the hello of a run, which cannot be changed later."""
        told, kept = self.args.get(what), self.memory.read_record(what)
        if told and kept and told != kept:
            raise Refused(f"the {what} differs from the one this site received earlier in this run")
        if told and not kept:
            self.memory.write_record(what, told)
        return told or kept

    def _keep(self, numbers: dict[str, Any], parts: Mapping[str, DenseVectors]) -> Reply:
        """Keep vectors under their keys; send them, or one of them scaled and masked, if asked."""
        shorten = self.policy.shorten
        rows = {name: shorten(_array(vectors.matrix[0])) for name, vectors in parts.items()}
        model, about = self._model(), name_common(self.request)
        for name, row in rows.items():
            self.memory.put(f"{self.request.tag}/{name}", row, self.round, model, about)
        if self.policy.budget is not None:
            (asked, *_) = list_questions(self.request, self.memory)
            entry = {"tag": self.request.tag, "parts": list(rows), "numbers": numbers}
            told = {**self.memory.read_record("told"), asked.digest: entry}
            self.memory.write_record("told", told)
        if rows and self.args["give"]:
            self.policy.allow_clear()
            return self.request.reply(numbers, rows)
        if rows and "mask" in self.args:
            kind = str(self.args["mask"]["part"])
            reply = self._give("", rows[kind], kind, model, self.round, about)
            return replace(reply, numbers=numbers)
        return self.request.reply(numbers)

    def _give(self, name: str, vector: NDArray[Any], *about: Any) -> Reply:
        """Send a vector scaled and masked (``about`` is for ``Masking``), else in clear."""
        if "mask" in self.args:
            return self.request.reply({}, {"masked": self._masking().mask(vector, *about)})
        self.policy.allow_clear()
        return self.request.reply({}, {name: vector})

    def _model(self) -> str:
        return digest_model(np.asarray(self.request.arrays["x"]).tobytes())

    def _control(self) -> DenseVectors | None:
        key = self.args["control"]
        if "control" in self.request.arrays:
            return DenseVectors(self._sent("control")[None])
        return None if key is None else DenseVectors(self._tensor(self._recall(str(key)))[None])

    def _recall(self, key: str) -> NDArray[Any]:
        size, dtype = self._kind()
        if not key:  # the memory that every client starts with
            return np.zeros(size, dtype=dtype)
        vector = self.memory.get(key)
        if vector is None or vector.shape != (size,) or vector.dtype.name != dtype:
            raise Stale(f"this client does not hold {key}")
        return vector

    def _masking(self) -> Masking:
        plan = None if self.account is None else self.account.plan
        given = self._signer(), None if plan is None else plan.cap
        return Masking(self.memory, self.args["mask"], self.request.client, *given)

    def _signer(self) -> Signer:
        """Return who signs here, and checks others against the plan's members: no site beside."""
        identity, plan = self.client.identity, self.account and self.account.plan
        if plan and plan.members:
            members = {name: PublicKey(line, name) for name, line in plan.members.items()}
            identity = replace(identity, peers=members)
        return Signer(identity, self.request.run, self.client.name)

    def _sent(self, name: str) -> torch.Tensor:
        return self._tensor(expect_vector(self.request.arrays, name, *self._kind()))

    def _metric(self) -> BlockMatrix | None:
        return read_metric(self.request.arrays, self.engine.model.size)

    def _stream(self) -> Stream:
        return Stream(int(self.args["seed"]), tuple(self.args["address"]))

    def _kind(self) -> tuple[int, str]:
        return self.engine.model.size, str(self.engine.model.dtype)[6:]

    def _tensor(self, array: NDArray[Any]) -> torch.Tensor:
        return torch.as_tensor(array.copy(), device=self.engine.model.device)


def _array(vector: torch.Tensor) -> NDArray[Any]:
    out: NDArray[Any] = vector.detach().to("cpu").contiguous().numpy()
    return out

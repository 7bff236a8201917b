"""Malformed replies: none may end a run, and each is its sender's failure, by name.

    python scripts/trust/replies.py                        # 10,000 at the mailbox, 1,000 end to end
    python scripts/trust/replies.py --judged 300 --runs 30

At the mailbox, honest replies of every kind of request are damaged in every way below and judged as
if they had arrived. End to end, one client of four answers with such replies at random while the
others train, on an in-memory grid with real apps. Prints a table and exits with 1 if an exception
got through, an unusable reply was accepted, an honest client was blamed, or a run ended.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the grid in memory is the tests'
from tests.flower.grid import QUICK, MemoryGrid, convex, flower_clients, memory_grid, task

from equifed.algorithms.drfa import DRFA
from equifed.algorithms.fedavg import FedAvg
from equifed.algorithms.qfedavg import QFedAvg
from equifed.algorithms.scaff_pd import ScaffPD
from equifed.contract.local import LocalSGD
from equifed.flower import mailbox as post
from equifed.flower.flwr_private import Received
from equifed.flower.messenger import SecureSums
from equifed.flower.wire import Request
from equifed.objectives import ChiSquare, CVaR
from equifed.steps.schedules import ConstantSteps
from equifed.training.loop import train

LOCAL = LocalSGD(lr=0.1, steps=2, batch_size=5)
CAPPED = ChiSquare(0.5, base=CVaR(0.5), scale=1.0)
"""With a cap: without, who claims a loss of 1e308 gets all the weight, and a hidden sum of one
client's vector is refused. Such a claim is well-formed; caps and guards deal with it."""

ALGORITHMS = [
    ScaffPD(CAPPED, LOCAL, ConstantSteps(0.4, 0.5)),
    FedAvg(LOCAL),
    DRFA(LOCAL, 0.1, CAPPED),
    QFedAvg(LOCAL, 1.0),
]
PRIVACY: list[Callable[[], Any]] = [lambda: None, SecureSums]
ODD = [None, True, -1, 0, 7.5, 1e308, -1e308, 10**400, float("nan"), float("inf"), "", "x"]
ODD += ["\ud800", [], {}, [[]], {"": {}}, 5e-324, "0" * 5000, 2**63, -(2**63) - 1, [1] * 50]

TOO_LARGE = "a value to be summed is not below"
"""What honest clients say when noise in a hidden sum has thrown the model away: changed bytes of a
masked vector are as good as any, and nobody can see whose they are (docs/hidden-sums.md)."""

Rng = np.random.Generator


class Hostile:
    """Content that raises at whatever is asked of it."""

    def __getattribute__(self, name: str) -> Any:
        raise (ZeroDivisionError, RecursionError, KeyError, MemoryError)[len(name) % 4]("hostile")


# -- ways to damage a reply ------------------------------------------------------------------------


def damage_text(rng: Rng, content: RecordDict) -> RecordDict:
    """Change or remove a piece of one of the texts."""
    record = content.config_records["equifed"]
    name = str(rng.choice(sorted(k for k in record if isinstance(record[k], str))))
    text = bytearray(str(record[name]).encode())
    a, b = sorted(int(k) for k in rng.integers(len(text), size=2))
    if rng.integers(2):
        text[a] = int(rng.integers(256))
    else:
        del text[a:b]
    record[name] = text.decode(errors="replace")
    return content


def damage_value(rng: Rng, content: RecordDict) -> RecordDict:
    """Put an odd value somewhere into the header."""
    record = content.config_records["equifed"]
    header = json.loads(str(record["header"]))
    table: Any = header
    while True:
        keys = list(table) if isinstance(table, dict) else list(range(len(table)))
        key = keys[int(rng.integers(len(keys)))]
        inner = table[key]
        if not isinstance(inner, dict | list) or not inner or rng.integers(4) == 0:
            break
        table = inner
    what = int(rng.integers(len(ODD) + 2))
    if what < len(ODD):
        table[key] = ODD[what]
    elif what == len(ODD):
        del table[key]
    elif isinstance(table, dict):
        table[f"more {key}"] = inner
    record["header"] = json.dumps(header)
    return content


def damage_header(rng: Rng, content: RecordDict) -> RecordDict:
    """Put something else in place of the header."""
    deep = "[" * 50_000 + "]" * 50_000
    long = json.dumps({"protocol": 3, "text": "x" * (1 << 21)})
    others: list[Any] = [deep, long, "1" * 6000, "null", "{}", "[]", b"{}", 3, 2.5, [1, 2], True]
    content.config_records["equifed"]["header"] = others[int(rng.integers(len(others)))]
    return content


def damage_arrays(rng: Rng, content: RecordDict) -> RecordDict:
    """Change the arrays: their bytes, what is said of them, or add some."""
    record = content.config_records["equifed"]
    data = bytearray(record.get("data", b"\0" * 64))  # type: ignore[arg-type]
    huge = [["gradient", "float64", [1 << 40]], ["gradient", "float64", [1 << 62, 1 << 62]]]
    what = int(rng.integers(9))
    if what == 0:
        data = data[: int(rng.integers(len(data)))] or bytearray(b"x")
    elif what == 1:
        data += bytes(int(rng.integers(1, 1 << 17)))
    elif what == 2:
        for k in rng.integers(len(data), size=3):
            data[int(k)] = int(rng.integers(256))
    elif what == 3:
        record["index"] = json.dumps([huge[int(rng.integers(2))]])
    elif what == 4:
        odd = [ODD[int(k)] for k in rng.integers(len(ODD), size=3)]
        record["index"] = json.dumps([odd])
    elif what == 5:
        record["index"] = json.dumps(json.loads(str(record.get("index", "[]"))) * 2)
    elif what == 6:
        numbers = np.full(len(data) // 8, [np.nan, np.inf, 1e200, -1e300][int(rng.integers(4))])
        data = bytearray(numbers.tobytes())
    else:
        dtype = str(rng.choice(["float64", "float32", "object", "<f8", "complex256", ""]))
        shape = tuple(int(n) for n in rng.integers(-2, 1 << 20, size=int(rng.integers(4))))
        name = str(rng.choice(["gradient", "displacement", "masked", "virus", ""]))
        array = Array(dtype, shape, str(rng.choice(["equifed.raw", "numpy.ndarray"])), bytes(data))
        for key in ("data", "index"):
            record.pop(key, None)
        content["arrays"] = ArrayRecord({name: array})
        return content
    record["data"] = bytes(data)
    record.setdefault("index", "[]")
    return content


def damage_records(rng: Rng, content: RecordDict) -> RecordDict:
    """Send other records, or things that are none."""
    others = [
        RecordDict(),
        RecordDict({"equifed": MetricRecord({"header": 1})}),
        RecordDict({"equifed": ArrayRecord()}),
        RecordDict({"other": content["equifed"]}),
        RecordDict({"equifed": content["equifed"], "arrays": ConfigRecord({"x": 1})}),
        Hostile(),
    ]
    return others[int(rng.integers(len(others)))]


def damage_message(rng: Rng, message: Message) -> None:
    """Damage what is around the content."""
    what = int(rng.integers(4))
    if what == 0:
        message.__dict__["_content"] = None
        code = [0, 2, 8, 10**9, -1][int(rng.integers(5))]
        message.__dict__["_error"] = Error(code, str(ODD[int(rng.integers(12))]))
    elif what == 1:
        message.__dict__["_content"] = None
    elif what == 2:
        message.__dict__["_content"] = ODD[int(rng.integers(len(ODD)))]
    else:
        message.__dict__["_error"], message.__dict__["_content"] = "no error", None


DAMAGES = [damage_text, damage_value, damage_value, damage_header, damage_arrays, damage_records]


def malform(rng: Rng, request: Message, reply: Message) -> Message:
    """Return a reply to the same request with something wrong in it."""
    honest = reply.content
    records = {k: type(v)({n: v[n] for n in v}) for k, v in honest.items()}
    damaged = Message(RecordDict(records), reply_to=request)
    kind = int(rng.integers(len(DAMAGES) + 1))
    if kind == len(DAMAGES):
        damage_message(rng, damaged)
    else:
        damaged.__dict__["_content"] = DAMAGES[kind](rng, damaged.content)
    return damaged


# -- at the mailbox --------------------------------------------------------------------------------


@dataclass
class Case:
    """An honest reply, and how it was judged."""

    exchange: post.Exchange
    client: int
    message: Message
    asked: Message

    @property
    def request(self) -> Request:
        """What was asked."""
        return self.exchange.requests[self.client]


def collect_cases(root: Path) -> list[Case]:
    """Return honest replies to every kind of request that the algorithms make."""
    found: dict[tuple[str, str], Case] = {}
    judge = post.Exchange._judge

    def record(self: post.Exchange, i: int, received: Received) -> None:
        judge(self, i, received)
        assert received.message is not None
        asked = next(m for m in grid.sent if m.metadata.message_id == received.answers)
        key = (type(hidden).__name__, self.requests[i].op)
        found.setdefault(key, Case(self, i, received.message, asked))

    post.Exchange._judge = record  # type: ignore[method-assign]
    try:
        for number, make in enumerate(PRIVACY):
            for k, algorithm in enumerate(ALGORITHMS):
                grid = memory_grid(convex(), task(), root / f"{number}-{k}")
                hidden = make()
                clients = flower_clients(grid, task(), QUICK, hidden)
                train(algorithm, clients, rounds=1, evaluate=("train", "test"))
    finally:
        post.Exchange._judge = judge  # type: ignore[method-assign]
    return list(found.values())


def judge_many(count: int, seed: int, root: Path) -> Counter[str]:
    """Damage and judge replies; return how many were refused, accepted, and got through."""
    rng, cases, out = np.random.default_rng(seed), collect_cases(root), Counter[str]()
    out["kinds of request"] = len({case.request.op for case in cases})
    for _ in range(count):
        case = cases[int(rng.integers(len(cases)))]
        answers, i = post.Answers(), case.client
        exchange = post.Exchange(
            case.exchange.mailbox, {i: case.request}, case.exchange.check, answers
        )
        message = malform(rng, case.asked, case.message)
        try:
            exchange._judge(i, Received(case.asked.metadata.message_id, message, ""))
        except BaseException as error:
            out["UNHANDLED"] += 1
            print(f"{case.request.op}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        if len(answers.replies) + len(answers.failures) != 1:
            out["UNHANDLED"] += 1
        elif answers.failures:
            out["refused, by name"] += 1
        elif _is_finite(answers.replies[i].arrays):
            out["accepted: as good as honest"] += 1
        else:
            out["UNUSABLE BUT ACCEPTED"] += 1
    return out


def _is_finite(arrays: Any) -> bool:
    return all(a.dtype == np.uint64 or bool(np.isfinite(a).all()) for a in arrays.values())


# -- end to end ------------------------------------------------------------------------------------


def run_many(count: int, seed: int, root: Path) -> Counter[str]:
    """Train with one client that sends malformed replies; return what became of the runs."""
    rng, out = np.random.default_rng(seed), Counter[str]()
    deadlines = replace(QUICK, on_missing="continue", quorum=0.5, timeout=5.0, grace=2.0)
    number = 0
    while out["malformed replies"] < count:
        grid = memory_grid(convex(), task(), root / str(number))
        hidden = PRIVACY[(number + number // len(ALGORITHMS)) % 2]()  # every pair of them
        clients = flower_clients(grid, task(), QUICK, hidden)
        clients.mailbox.deadlines = deadlines
        grid.tamper = _make_tamper(grid, rng, out)
        try:
            history = train(
                ALGORITHMS[number % len(ALGORITHMS)],
                clients,
                rounds=3,
                missing=deadlines.to_policy(),
                evaluate=("test",),
            )
            assert history.parameters is not None
            good = all(bool(torch.isfinite(v).all()) for v in history.parameters.values())
            named = {e["client"]: e["reason"] for e in history.events if e["event"] == "quarantine"}
            named.pop("client-1", None)
            out["runs finished" if good else "NON-FINITE MODEL"] += 1
            for client, reason in named.items():
                noise = isinstance(hidden, SecureSums) and TOO_LARGE in reason
                out["noise in a hidden sum" if noise else "HONEST CLIENTS BLAMED"] += 1
                if not noise:
                    print(f"run {number}: {client} {reason}"[:300], file=sys.stderr)
        except Exception as error:
            out["RUNS ENDED"] += 1
            kind = type(hidden).__name__
            print(f"run {number} ({kind}): {type(error).__name__}: {error}", file=sys.stderr)
        number += 1
    return out


def _make_tamper(grid: MemoryGrid, rng: Rng, out: Counter[str]) -> Any:
    def tamper(partition: int, request: Message, reply: Message) -> list[Message]:
        if partition != 1 or rng.integers(2):
            return [reply]
        out["malformed replies"] += 1
        return [malform(rng, request, reply)]

    return tamper


def main() -> int:
    """Damage, judge, run, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--judged", type=int, default=10_000, help="replies at the mailbox")
    parser.add_argument("--runs", type=int, default=1_000, help="malformed replies end to end")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="equifed-") as temporary:
        judged = judge_many(chosen.judged, chosen.seed, Path(temporary) / "judged")
        ran = run_many(chosen.runs, chosen.seed, Path(temporary) / "runs")
    for title, found in (("at the mailbox", judged), ("end to end", ran)):
        print(title, dict(found))
    return 1 if any(k.isupper() and n for k, n in (judged + ran).items()) else 0


if __name__ == "__main__":
    sys.exit(main())

"""Do two versions of equifed compute the same? Run on each, then compare the files.

    python scripts/agreement.py dump OUT.npz        # with the version that is installed
    python scripts/agreement.py compare A.npz B.npz

Every algorithm of the catalogue runs 12 rounds, and 60 where step sizes are meant to be too bold,
on a convex problem (softmax regression with an L2 penalty) and on a network (one hidden layer), in
float64 on both engines; the last model, the weights, the objective and the certified gap of every
round and the halvings of the step sizes are stored. Version 0.1 had other names for some
arguments; the few lines under ``OLD`` translate.
"""

from __future__ import annotations

import dataclasses
import sys

import numpy as np
import torch

try:
    from equifed.algorithms.scaff_pd import ScaffPD
    from equifed.algorithms.scaff_pd_ia import ScaffPDIA
    from equifed.contract.local import LocalSGD
    from equifed.data import Federation
    from equifed.engines.loop import LoopClients
    from equifed.engines.stacked.clients import StackedClients
    from equifed.objectives import ChiSquare, CVaR
    from equifed.runs.catalogue import ALGORITHMS
    from equifed.steps.automatic import AutoSteps
    from equifed.training.loop import train

    OLD = False
except ImportError:  # version 0.1
    from equifed.auto_steps import AutoSteps
    from equifed.catalogue import ALGORITHMS
    from equifed.local import LocalSGD

    from equifed.algorithms.scaff_pd import ScaffPD
    from equifed.algorithms.scaff_pd_ia import ScaffPDIA
    from equifed.data import Federation
    from equifed.engines.loop import LoopClients
    from equifed.engines.stacked import StackedClients
    from equifed.objectives import ChiSquare, CVaR
    from equifed.training import train

    OLD = True

ROUNDS = 12
SIZES = (40, 25, 60, 12, 33)


def federation() -> Federation:
    """Return five clients of unequal sizes whose classes overlap differently."""
    draw = np.random.default_rng(7)
    clients = {}
    for i, m in enumerate(SIZES):
        inputs = draw.standard_normal((m, 6)) + 0.4 * i
        scores = inputs @ draw.standard_normal((6, 3)) + draw.gumbel(size=(m, 3))
        clients[f"client {i}"] = (inputs, scores.argmax(axis=1))
    return Federation.from_clients(clients)


def work(**more: object) -> LocalSGD:
    """Return local work on minibatches."""
    size = {"batch" if OLD else "batch_size": 8}
    return LocalSGD(lr=0.05, steps=5, **size, **more)


def cases() -> dict[str, object]:
    """Return the algorithms: with defaults, with minibatches, with sampled clients."""
    out = {}
    draws = "participants" if OLD else "clients_per_round"
    gradients = "gradient_batch" if OLD else "gradient_batch_size"
    for name, entry in ALGORITHMS.items():
        if "algorithm" in getattr(entry.load(), "__dataclass_fields__", ()):
            continue  # wrappers, which 0.1 had inside SCAFF-PD
        make = entry.load()
        fields = (
            {f.name for f in dataclasses.fields(make)} if dataclasses.is_dataclass(make) else set()
        )
        first = {"objective": ChiSquare(0.1)} if name == "scaff-pd" else {}
        out[name] = make(**first)
        if "local" in fields:
            out[f"{name}, minibatches"] = make(**first, local=work())
        if "participation" in fields:
            out[f"{name}, part"] = make(**first, participation=0.6)
        if draws in fields:
            out[f"{name}, drawn"] = make(**first, **{draws: 3})
        if gradients in fields:
            out[f"{name}, noisy"] = make(**first, local=work(), **{gradients: 8})
        if name in ("afl", "drfa", "agnostic-fedavg"):
            out[f"{name}, cvar"] = make(objective=CVaR(0.5))
    # Steps so bold that the safeguard has to act, by each of its measures.
    for horizon in (16.0, 60.0):
        bold = {"steps": AutoSteps(horizon=horizon), "local": LocalSGD(lr=1.0, steps=60)}
        noisy = {"local": LocalSGD(lr=1.0, steps=60), gradients: 8}
        out[f"bold, cvar, {horizon}"] = ScaffPD(CVaR(0.5), **bold)
        out[f"bold, part, {horizon}"] = ScaffPD(ChiSquare(0.1), participation=0.6, **bold)
        out[f"bold, noisy, {horizon}"] = ScaffPD(ChiSquare(0.1), **bold | noisy)
        out[f"bold, signed, {horizon}"] = ScaffPDIA(0.4, **bold)
        out[f"bold, chosen, {horizon}"] = ScaffPDIA("auto", warmup=20, rho=0.5, **bold)
    return out


def engines(network: bool) -> dict[str, object]:
    """Return both engines with the same model."""
    torch.manual_seed(3)
    hidden = [torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3)]
    module = torch.nn.Sequential(*hidden) if network else torch.nn.Linear(6, 3)
    loss = LOSS
    given = {"l2": 0.0 if network else 1e-2, "dtype": torch.float64}
    given |= {} if OLD else {"init": "fresh"}  # version 0.1 redrew every module
    return {
        "loop": LoopClients(federation(), module, loss, **given),
        "stacked": StackedClients(federation(), module, loss, **given),
    }


def dump(path: str) -> None:
    """Run everything and write it down."""
    torch.set_num_threads(1)
    found = {}
    for problem in ("convex", "network"):
        for engine, clients in engines(problem == "network").items():
            for name, algorithm in cases().items():
                if name.startswith("bold") and engine == "loop":
                    continue  # slow, and about the algorithm, not the engine
                rounds = 5 * ROUNDS if name.startswith("bold") else ROUNDS
                given = {} if OLD else {"give_out": "last"}  # what 0.1 always gave out
                history = train(algorithm, clients, rounds=rounds, seed=5, **given)
                key = f"{problem}/{engine}/{name}"
                flat = [p.double().numpy().ravel() for p in history.parameters.values()]
                found[f"{key}/model"] = np.concatenate(flat)
                values = [r.objective for r in history.rounds if r.objective is not None]
                found[f"{key}/objective"] = np.array(values)
                proved = [r.numbers for r in history.rounds if "gap" in r.numbers]
                gaps = [n.get("uncapped_gap", n["gap"]) for n in proved]  # 0.1 had no cap
                found[f"{key}/gap"] = np.array(gaps)
                halved = [r.numbers["halvings"] for r in history.rounds if "halvings" in r.numbers]
                found[f"{key}/halvings"] = np.array(halved)
                found[f"{key}/weights"] = np.array([*history.weights.values()])
    np.savez(path, **found)
    print(f"{len(found) // 5} runs of {ROUNDS} rounds written to {path}")


def compare(first: str, second: str) -> int:
    """Say where two files differ and by how much; return 1 if they differ beyond rounding."""
    a, b = np.load(first), np.load(second)
    keys = sorted(set(a) & set(b))
    for key in sorted(set(a) ^ set(b)):
        print(f"only in one: {key}")
    worst = 0.0
    same = 0
    for key in keys:
        if a[key].shape == b[key].shape and np.array_equal(a[key], b[key]):
            same += 1
            continue
        if a[key].shape != b[key].shape:
            print(f"{key}: shapes {a[key].shape} and {b[key].shape}")
            worst = np.inf
            continue
        off = float(np.max(np.abs(a[key] - b[key]) / (1e-300 + np.abs(b[key]).max())))
        worst = max(worst, off)
        print(f"{key}: relative difference {off:.1e}")
    print(f"{same} of {len(keys)} arrays are equal to the bit; largest difference {worst:.1e}")
    return int(worst > 1e-9)


if __name__ == "__main__":
    if OLD:
        from equifed.losses import cross_entropy as LOSS
    else:
        from equifed.models.losses import cross_entropy as LOSS
    command, *paths = sys.argv[1:]
    sys.exit(dump(*paths) if command == "dump" else compare(*paths))

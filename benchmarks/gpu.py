"""A FedAvg round on a GPU: agreement with the CPU, and times against the sequential loop and JAX.

    python -m benchmarks.gpu [clients ...] [--beside-jax | --unequal | --passes]
    python -m benchmarks.gpu [--shapes N | --catalogue]

600 samples x 784 features per client, batch 50, 12 local steps, an MLP 784-50-10 in float32,
shuffled minibatches; a CNN at 1,000 clients. Every variant must end at the same loss. With
``--unequal`` 100 clients of 20 to 1,200 samples, one pass with smaller and smaller minibatches,
dropout, step by step and as graphs. ``--passes`` measures losses, gradients and an evaluation on
all samples in reads of the data. ``--beside-jax`` times rounds inside ``ef.train`` and compares
updates with float64.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from benchmarks.results import FOLDER, store
from tests.problems import classification

from equifed.algorithms.fedavg import FedAvg
from equifed.contract.local import LocalSGD, LocalWork, SmoothedHinge
from equifed.contract.streams import Stream
from equifed.data import Federation, Split
from equifed.engines.in_process import InProcessClients
from equifed.engines.loop import LoopClients
from equifed.engines.minibatches import Minibatches
from equifed.engines.simulate import simulate
from equifed.engines.stacked.clients import StackedClients
from equifed.engines.stacked.fused import Fused
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy
from equifed.training.loop import train
from equifed.training.trackers import Callback

SAMPLES, FEATURES, BATCH, STEPS, LR = 600, 784, 50, 12, 0.05
WORK = LocalSGD(lr=LR, steps=STEPS, batch_size=BATCH)


def problem(
    clients: int, samples: int = SAMPLES, shape: tuple[int, ...] = (FEATURES,)
) -> Federation:
    """Return clients of this size; large federations repeat 100 clients."""
    distinct = min(clients, 100)
    few = classification([samples] * distinct, shape, 10, dtype=np.float32).train
    inputs = np.tile(few.inputs, (clients // distinct, *[1] * len(shape)))
    targets = np.tile(few.targets, clients // distinct)
    names = tuple(f"client {i}" for i in range(clients))
    split = Split(inputs, targets, np.arange(clients + 1) * samples)
    return Federation("random", names, split, classes=10)


def one_round(
    engine: InProcessClients, x: torch.Tensor, r: int, work: LocalSGD = WORK
) -> torch.Tensor:
    weights = np.full(len(engine.names), 1 / len(engine.names))
    moved = engine.local_steps(x, work, Stream(0).at("round", r))  # type: ignore[attr-defined]
    return x - moved.displacement.weighted_sum(weights)


def seconds(step: Callable[[int], object], rounds: int = 10) -> float:
    """Return the median seconds of a round, after some that warm up."""
    for r in range(min(rounds, 3)):
        step(r)
    times = []
    for r in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(r)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def measured(engine: InProcessClients, rounds: int = 10) -> tuple[float, float]:
    """Return the seconds of a round, and the loss after two rounds from the start."""
    x = engine.initial(Stream(0))
    took = seconds(partial(one_round, engine, x), rounds)
    for r in range(2):
        x = one_round(engine, x, r)
    return took, float(np.mean(engine.losses(x, Stream(0))))  # type: ignore[attr-defined]


def agreement() -> float:
    """Return the largest difference between CUDA and the loop on the CPU in float64.

    Four rounds, so that graphs are captured and replayed; with everything local work can do.
    """
    data, worst = problem(6, samples=30, shape=(20,)), 0.0
    everything = {"proximal": 0.1, "radius": 2.0, "average": True, "mean_gradient": True}
    everything |= {"snapshot": 2, "hinge": SmoothedHinge(1.0, 0.1)}
    works = [
        LocalWork(lr=0.1, steps=4, batch_size=8),
        LocalWork(lr=0.1, steps=3),
        LocalWork(lr=0.1, epochs=2, batch_size=8, **everything),
    ]
    modules = [
        build("mlp", (20,), 10, dropout=0.3),
        torch.nn.Sequential(torch.nn.LayerNorm(20), torch.nn.Linear(20, 10)),
    ]
    for module in modules:
        given = (data, module, cross_entropy)
        cpu = LoopClients(*given, l2=0.1, dtype=torch.float64)
        for options in ({}, {"memory": 1}):
            gpu = StackedClients(*given, l2=0.1, dtype=torch.float64, device="cuda", **options)
            for work in works:
                worst = max(worst, difference(cpu, gpu, work))
            replayed = [g for g in gpu.graphs._known.values() if g] if gpu.graphs else []
            assert replayed, "no graph was replayed"
    return worst


def difference(cpu: LoopClients, gpu: StackedClients, work: LocalSGD) -> float:
    worst, p = 0.0, np.full(6, 1 / 6)
    for r in range(4):
        stream, sums = Stream(0).at(r), []
        for engine in (cpu, gpu):
            x = cpu.initial(Stream(r)).to(engine.model.device)
            losses, control = engine.value_and_gradient(x, stream)
            extra = {} if work.hinge is None else {"slopes": np.linspace(0.1, 1, 6)}
            target = control.weighted_sum(p)
            moved = engine.local_steps(x, work, stream, control=control, target=target, **extra)
            handles = [moved.displacement, moved.snapshot, moved.average, moved.mean_gradient]
            vectors = [h.weighted_sum(p).cpu().numpy() for h in handles if h is not None]
            sums.append(np.concatenate([losses, *vectors]))
        worst = max(worst, float(np.abs(sums[0] - sums[1]).max()))
    return worst


class Enough(Exception):
    """Ends a run once its rounds were timed: what comes after them is no round."""


class Clock(Callback):
    """The seconds from each round's end to the next one's."""

    def __init__(self, rounds: int) -> None:
        self.rounds, self.ends = rounds, list[float]()

    def round(self, record: object, info: object) -> None:
        """Note when it ended."""
        torch.cuda.synchronize()
        self.ends.append(time.perf_counter())
        if len(self.ends) == self.rounds:
            raise Enough

    def median(self) -> float:
        """Return the median time of a round."""
        return float(np.median(np.diff(self.ends)[WARM:]))


WARM, TIMED = 5, 25
"""Rounds that warm up, and rounds that are timed."""


def trained(engine: StackedClients) -> float:
    """Return the median seconds of a FedAvg round inside ``ef.train``, shuffles drawn in it."""
    clock = Clock(WARM + TIMED)
    with suppress(Enough):
        train(FedAvg(WORK), engine, rounds=WARM + TIMED, callbacks=[clock], progress=False)
    return clock.median()


def update_error(found: torch.Tensor, x: torch.Tensor, few: Split, orders: torch.Tensor) -> float:
    """Return the largest relative error of clients' updates (c, d), against float64."""
    worst, model = 0.0, build("mlp", (FEATURES,), 10).double().to(x.device)
    for i, order in enumerate(orders):
        inputs, targets = (torch.as_tensor(v).to(x.device) for v in few.client(i))
        start = x.double()
        torch.nn.utils.vector_to_parameters(start.clone(), model.parameters())
        for rows in order.view(STEPS, BATCH):
            loss = cross_entropy(model(inputs[rows].double()), targets[rows]).mean()
            with torch.no_grad():
                steps = torch.autograd.grad(loss, [*model.parameters()])
                for p, step in zip(model.parameters(), steps, strict=True):
                    p -= LR * step
        moved = start - torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        worst = max(worst, float((found[i].double() - moved).norm() / moved.norm()))
    return worst


CHECKED = 3
"""Clients whose updates are compared with float64."""


def our_error(engine: StackedClients, few: Split) -> float:
    some, stream = engine.subset(range(CHECKED)), Stream(0).at("round", 1, "local")
    x = engine.initial(Stream(0))
    moved = some.local_steps(x, WORK, stream).displacement.dense()  # type: ignore[union-attr]
    ids, sizes = torch.arange(CHECKED, device=x.device), np.full(CHECKED, SAMPLES)
    plan = Minibatches(stream, ids, sizes, BATCH, x.dtype)
    orders = torch.cat([plan.at(step).positions for step in range(STEPS)], dim=1)
    return update_error(moved, x, few, orders)


def jax_round(clients: int, precision: str, x: torch.Tensor) -> tuple[Callable, Callable]:
    """Return the same round in JAX, one compiled program over all clients and steps.

    Its products are in tf32 unless one asks for the "highest" precision. Beside it, what returns
    the error of its clients' updates.
    """
    import jax
    import jax.numpy as jnp

    split, repeat = problem(100).train, clients // 100
    inputs = jnp.tile(jnp.asarray(split.inputs).reshape(100, SAMPLES, FEATURES), (repeat, 1, 1))
    targets = jnp.tile(jnp.asarray(split.targets).reshape(100, SAMPLES), (repeat, 1))
    named = build("mlp", (FEATURES,), 10)
    torch.nn.utils.vector_to_parameters(x.cpu(), named.parameters())
    start = tuple(jnp.asarray(p.detach().numpy().T) for p in named.parameters())

    def loss(p: tuple, a: object, t: object) -> object:
        hidden = jax.nn.relu(jnp.matmul(a, p[0], precision=precision) + p[1])
        out = jnp.matmul(hidden, p[2], precision=precision) + p[3]
        return -jnp.take_along_axis(jax.nn.log_softmax(out), t[:, None], 1).mean()

    def client(p: tuple, a: object, t: object, key: object) -> tuple:
        order = jax.random.permutation(key, SAMPLES).reshape(STEPS, BATCH)

        def step(u: tuple, rows: object) -> tuple:
            g = jax.grad(loss)(u, a[rows], t[rows])
            return jax.tree.map(lambda v, w: v - LR * w, u, g), None

        return jax.lax.scan(step, p, order)[0]

    def ends(p: tuple, a: object, t: object, keys: object) -> tuple:
        return jax.vmap(client, (None, 0, 0, 0))(p, a, t, keys)

    @jax.jit
    def everyone(p: tuple, a: object, t: object, key: object) -> tuple:
        return jax.tree.map(lambda v: v.mean(0), ends(p, a, t, jax.random.split(key, clients)))

    def error() -> float:
        keys = jax.random.split(jax.random.key(0), clients)[:CHECKED]
        found = jax.jit(ends)(start, inputs[:CHECKED], targets[:CHECKED], keys)
        rows = [np.asarray(v).swapaxes(1, -1).reshape(CHECKED, -1) for v in found]
        moved = x - torch.as_tensor(np.concatenate(rows, axis=1)).to(x)
        orders = np.stack([np.asarray(jax.random.permutation(key, SAMPLES)) for key in keys])
        return update_error(moved, x, split, torch.as_tensor(orders.copy()).to(x.device).long())

    return lambda r: jax.block_until_ready(
        everyone(start, inputs, targets, jax.random.key(r))
    ), error


VARIANTS = {
    "torch.func, step by step": {"fast": False, "graph": False},
    "written out, step by step": {"graph": False},
    "torch.func, graph": {"fast": False},
    "torch.func, compiled, graph": {"fast": False, "compiled": True},
    "written out, graph": {},
    "written out, graph, tf32": {"precision": "tf32"},
    "written out, graph, bf16": {"precision": "bf16"},
}


JAX = {"written out, graph": "highest", "written out, graph, tf32": "default"}
"""JAX's precisions of products, by the variant that multiplies as exactly."""


def engine_for(
    data: Federation, model: str | torch.nn.Module, graph: bool = True, **options: object
) -> StackedClients:
    engine = simulate(data, model, device="cuda", **options)
    if not graph:
        engine.graphs = None
    return engine


def compare_with_jax(sizes: list[int]) -> dict[str, dict[str, float]]:
    """Print and return the seconds of a round beside JAX's, and errors against float64."""
    rows: dict[str, dict[str, float]] = {}
    for clients in sizes:
        data = problem(clients)
        for variant, precision in JAX.items():
            label = f"{clients:,} clients, {'full' if precision == 'highest' else 'tf32'}"
            engine = engine_for(data, "mlp", **VARIANTS[variant])
            assert isinstance(engine.fused, Fused), engine.fused
            row = rows[label] = {"equifed": trained(engine)}
            ours, x = our_error(engine, data.train), engine.initial(Stream(0))
            engine.fused = "left out"
            row["equifed, graphs"] = trained(engine)
            del engine
            torch.cuda.empty_cache()
            step, error = jax_round(clients, precision, x)
            row["JAX"] = seconds(step, TIMED)
            errors = f"errors {ours:.1e} and {error():.1e}"
            del step, error
            times = ", ".join(f"{who} {1e3 * took:.2f} ms" for who, took in row.items())
            ratio = f"{row['JAX'] / row['equifed']:.2f} times as fast as JAX"
            print(f"{label}: {times}: {ratio}; {errors}", flush=True)
    return rows


def compare_unequal() -> None:
    """Print the seconds of one pass of clients of unequal sizes, step by step and as graphs."""
    sizes = np.linspace(20, 1200, 100).astype(int).tolist()
    data = classification(sizes, (FEATURES,), 10, dtype=np.float32)
    module = build("mlp", (FEATURES,), 10, hidden=[50], dropout=0.5)
    for batch in (50, 5, 1):
        work, took = LocalSGD(lr=LR, epochs=1, batch_size=batch), []
        for graph in (False, True):
            engine = engine_for(data, module, graph)
            x = engine.initial(Stream(0))
            rounds = 5 if graph or batch > 1 else 1
            took.append(seconds(partial(one_round, engine, x, work=work), rounds))
        print(f"batch {batch}: step by step {1e3 * took[0]:.1f} ms, graphs {1e3 * took[1]:.1f} ms, "
              f"{took[0] / took[1]:.1f} times as fast", flush=True)  # fmt: skip


def pass_error(data: Federation, activation: str, precision: str) -> tuple[float, float]:
    """Return the error of some clients' gradients against float64, as programs and as products."""
    torch.manual_seed(0)
    between = torch.nn.ReLU() if activation == "relu" else torch.nn.Tanh()
    module = torch.nn.Sequential(torch.nn.Linear(FEATURES, 50), between, torch.nn.Linear(50, 10))
    given = {"l2": 1e-3, "device": "cuda", "init": "given"}
    engine = StackedClients(data, module, precision=precision, **given).subset(range(20))
    loop = LoopClients(data, module, dtype=torch.float64, **given).subset(range(20))
    x = loop.flatten(module)
    true = loop.value_and_gradient(x, Stream(0))[1].dense()  # type: ignore[union-attr]
    errors = []
    for fused in (engine.fused, "left out"):
        engine.fused = fused
        found = engine.value_and_gradient(x.float(), Stream(0))[1].dense()  # type: ignore[union-attr]
        errors.append(float((found - true).norm() / true.norm()))
    return errors[0], errors[1]


def compare_passes(sizes: list[int]) -> dict[str, dict[str, float]]:
    """Print and return the seconds of passes over all samples, and their errors."""
    rows: dict[str, dict[str, float]] = {}
    for clients in sizes:
        data = problem(clients)
        for precision in ("full", "tf32"):
            engine = engine_for(data, "mlp", precision=precision)
            x, fused = engine.initial(Stream(0)), engine.fused
            assert isinstance(fused, Fused), fused
            passes: dict[str, Callable[[int], object]] = {
                "gradients": lambda _, e=engine, x=x: e.value_and_gradient(x, Stream(0)),
                "losses": lambda _, e=engine, x=x: e.losses(x, Stream(0)),
                "evaluation": lambda _, e=engine, x=x: e.evaluate(x, ("train",)),
            }
            row = {"one read": seconds(lambda _, e=engine: e._inputs.sum(), TIMED)}
            row |= {name: seconds(call, TIMED) for name, call in passes.items()}
            engine.fused, engine._evaluator.quick = "left out", None
            row |= {f"{name}, products": seconds(call, TIMED) for name, call in passes.items()}
            rows[f"{clients:,} clients, {precision}"] = row
            reads = (f"{name} {1e3 * t:.2f} ms, {t / row['one read']:.1f} reads"
                     for name, t in row.items())  # fmt: skip
            print(f"{clients} clients, {precision}: {'; '.join(reads)}", flush=True)
            if clients == sizes[0]:
                for activation in ("relu", "tanh"):
                    ours, plain = pass_error(data, activation, precision)
                    print(f"  error, {activation}: {ours:.1e} (products {plain:.1e})", flush=True)
            del engine
            torch.cuda.empty_cache()
    return rows


ROUNDING = {"full": 2e-5, "tf32": 4e-3}
"""Of updates after some steps; the other path leaves tf32 out where it would not be faster."""


def compare_shape(seed: int) -> str:
    """Return how far a drawn model's programs are from the loop, or why there are none."""
    draw = np.random.default_rng(seed)
    features, outputs = int(np.exp(draw.uniform(1.1, 8.3))), int(draw.integers(2, 20))
    hidden = np.exp(draw.uniform(np.log(2), np.log(257), size=draw.integers(0, 3))).astype(int)
    sizes = draw.integers(1, 130, size=6).tolist()
    data = classification(sizes, (features,), outputs, dtype=np.float32)
    between, layers = [torch.nn.ReLU, torch.nn.Tanh][int(draw.integers(2))], []
    for fan_in, fan_out in pairwise([features, *hidden.tolist()]):
        layers += [torch.nn.Linear(fan_in, fan_out), between()]
    module = torch.nn.Sequential(
        *layers, torch.nn.Linear([features, *hidden.tolist()][-1], outputs)
    )
    work = LocalSGD(lr=LR, epochs=int(draw.integers(1, 4)), batch_size=int(draw.integers(1, 65)))
    precision = ["full", "tf32"][seed % 2]
    gpu = StackedClients(data, module, l2=0.01, device="cuda", precision=precision)
    shape = f"{features}-{'-'.join(map(str, [*hidden, outputs]))}, {work.batch_size}, {precision}"
    why = gpu.fused.refuse(work.work(), gpu.sizes) if isinstance(gpu.fused, Fused) else gpu.fused
    if why is not None:
        return f"{shape}: {why}"
    loop = LoopClients(data, module, l2=0.01, dtype=torch.float64, device="cuda")
    x, stream = loop.initial(Stream(seed)), Stream(seed).at("local")
    true = loop.local_steps(x, work, stream).displacement.dense()  # type: ignore[union-attr]
    found = gpu.local_steps(x.float(), work, stream).displacement.dense()  # type: ignore[union-attr]
    gpu.fused = "left out"
    plain = gpu.local_steps(x.float(), work, stream).displacement.dense()  # type: ignore[union-attr]
    errors = [float((true - one).norm() / true.norm()) for one in (found, plain)]
    beyond = errors[0] > max(ROUNDING[precision], 3 * errors[1])
    told = f"{shape}: {errors[0]:.1e}, step by step {errors[1]:.1e}"
    return told + "  BEYOND" * beyond


def compare_shapes(count: int) -> None:
    """Print how far drawn shapes are from the loop in float64, many at once: most is compiling.

    Beyond rounding is an error above :data:`ROUNDING` that is three times that of the other path.
    Even that may be rounding: a unit of ReLU near zero falls on one side or the other.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(14, os.cpu_count() or 1), spawn) as pool:
        told = list(pool.map(compare_shape, range(count)))
    print(*told, sep="\n")
    refused = sum("do not fit" in line or "larger" in line for line in told)
    wrong = sum("BEYOND" in line for line in told)
    print(f"{count} shapes: {refused} refused by the plan, {wrong} beyond rounding", flush=True)


def count_catalogue() -> None:
    """Print the share of the catalogue's algorithms whose local steps are programs."""
    from tests.conformance.cases import CASES

    data, reasons = problem(6, samples=20, shape=(20,)), dict[str, list[str]]()
    plain = {name.partition("/")[0]: case for name, case in CASES.items() if "/plain" in name}
    for name, algorithm in plain.items():
        engine = engine_for(data, "mlp", l2=0.1)
        notes = ["no local steps"]
        try:
            history = train(algorithm, engine, rounds=2, progress=False)
            told = [e.get("reason", "") for e in history.events if e["event"] == "note"]
            notes = [note for note in told if note.startswith("Local steps")] or notes
        except (ValueError, TypeError) as error:
            notes = [f"not run: {error}"[:90]]
        reasons.setdefault(" ".join(notes), []).append(name)
    for reason, names in reasons.items():
        print(f"{len(names)} of {len(plain)}: {reason} ({', '.join(names)})", flush=True)


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    print(f"CUDA against the loop on the CPU, float64: {agreement():.1e}", flush=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[100, 1000, 10000])
    parser.add_argument("--beside-jax", action="store_true", help="only what JAX does, too")
    parser.add_argument("--store", type=Path, nargs="?", const=FOLDER, help="keep the times")
    parser.add_argument("--shapes", type=int, help="only so many drawn shapes beside the loop")
    parser.add_argument("--catalogue", action="store_true", help="only who has local programs")
    parser.add_argument("--passes", action="store_true", help="only passes over all samples")
    parser.add_argument("--unequal", action="store_true", help="only clients of unequal sizes")
    given = parser.parse_args()
    if given.shapes or given.catalogue or given.unequal:
        if given.catalogue:
            count_catalogue()
        if given.shapes:
            compare_shapes(given.shapes)
        if given.unequal:
            compare_unequal()
        return
    if given.passes:
        rows = compare_passes(given.sizes)
        if given.store is not None:
            store("gpu-passes", "one read", rows, given.store)
        return
    if given.beside_jax:
        rows = compare_with_jax(given.sizes)
        if given.store is not None:
            store("gpu-dense", "JAX", rows, given.store, {"jax": importlib.metadata.version("jax")})
        return
    sizes = given.sizes
    loop, reference = measured(LoopClients(problem(100), "mlp", device="cuda"), rounds=1)
    print(f"loop on cuda, 100 clients: {1e3 * loop:.0f} ms per round", flush=True)
    times: dict[tuple[int, str], float] = {}
    for clients in sizes:
        data = problem(clients)
        for name, options in VARIANTS.items():
            if clients > 1000 and (options.get("compiled") or not options.get("graph", True)):
                continue  # slower, and long to prepare
            took, loss = measured(engine_for(data, "mlp", **options))
            times[clients, name] = took
            ratio = f", {loop / took:.0f} times the loop" if clients == 100 else ""
            print(f"{clients:6d} clients, {name}: {1e3 * took:.2f} ms per round{ratio}", end="")
            print(f" (loss {loss:.5f}, off by {abs(loss / reference - 1):.0e})", flush=True)
    images = problem(1000, samples=100, shape=(28, 28))
    for name, options in (("step by step", {"graph": False}), ("graph", {})):
        took, loss = measured(engine_for(images, "cnn", chunk=250, **options), rounds=3)
        print(
            f"  1000 clients, CNN, {name}: {1e3 * took:.1f} ms per round (loss {loss:.5f})",
            flush=True,
        )


if __name__ == "__main__":
    main()

"""A FedAvg round on a GPU: agreement with the CPU, and times against the sequential loop and JAX.

    python -m benchmarks.gpu [clients ...] [--beside-jax | --unequal] [--store]

600 samples x 784 features per client, batch 50, 12 local steps, an MLP 784-50-10 in float32,
shuffled minibatches; a CNN at 1,000 clients. Every variant must end at the same loss. With
``--unequal`` 100 clients of 20 to 1,200 samples, one pass with smaller and smaller minibatches,
dropout, step by step and as graphs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from benchmarks.results import FOLDER, store
from tests.problems import classification

from equifed.contract.local import LocalSGD, LocalWork, SmoothedHinge
from equifed.contract.streams import Stream
from equifed.data import Federation, Split
from equifed.engines.in_process import InProcessClients
from equifed.engines.loop import LoopClients
from equifed.engines.simulate import simulate
from equifed.engines.stacked.clients import StackedClients
from equifed.models.architectures import build
from equifed.models.losses import cross_entropy

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


def jax_round(clients: int, precision: str) -> Callable[[int], object] | None:
    """Return the same round in JAX, one compiled program over all clients and steps.

    Its products are in tf32 unless one asks for the "highest" precision.
    """
    try:
        import jax
        import jax.numpy as jnp
    except ImportError:
        return None
    split, repeat = problem(100).train, clients // 100
    inputs = jnp.tile(jnp.asarray(split.inputs).reshape(100, SAMPLES, FEATURES), (repeat, 1, 1))
    targets = jnp.tile(jnp.asarray(split.targets).reshape(100, SAMPLES), (repeat, 1))
    w1, w2 = jnp.full((FEATURES, 50), 0.01), jnp.full((50, 10), 0.02)
    x = (w1, jnp.zeros(50), w2, jnp.zeros(10))

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

    @jax.jit
    def everyone(p: tuple, a: object, t: object, key: object) -> tuple:
        ends = jax.vmap(client, (None, 0, 0, 0))(p, a, t, jax.random.split(key, clients))
        return jax.tree.map(lambda v: v.mean(0), ends)

    return lambda r: jax.block_until_ready(everyone(x, inputs, targets, jax.random.key(r)))


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
    """Print and return the seconds of a round beside JAX's, in full precision and in tf32."""
    rows: dict[str, dict[str, float]] = {}
    for clients in sizes:
        data = problem(clients)
        for variant, precision in JAX.items():
            label = f"{clients:,} clients, {'full' if precision == 'highest' else 'tf32'}"
            rows[label] = {"equifed": measured(engine_for(data, "mlp", **VARIANTS[variant]))[0]}
            torch.cuda.empty_cache()
            step = jax_round(clients, precision)
            if step is not None:
                rows[label]["JAX"] = seconds(step)
            del step
            times = ", ".join(f"{who} {1e3 * took:.2f} ms" for who, took in rows[label].items())
            print(f"{label}: {times}", flush=True)
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


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__, flush=True)
    print(f"CUDA against the loop on the CPU, float64: {agreement():.1e}", flush=True)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", nargs="*", type=int, default=[100, 1000, 10000])
    parser.add_argument("--beside-jax", action="store_true", help="only what JAX does, too")
    parser.add_argument("--store", type=Path, nargs="?", const=FOLDER, help="keep the times")
    parser.add_argument("--unequal", action="store_true", help="only clients of unequal sizes")
    given = parser.parse_args()
    if given.unequal:
        compare_unequal()
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
    torch.cuda.empty_cache()
    for clients in sizes:
        for ours, precision in JAX.items():
            step = jax_round(clients, precision)
            if step is not None:
                took = seconds(step)
                print(
                    f"{clients:6d} clients, JAX, {precision}: {1e3 * took:.2f} ms per round; "
                    f"{ours!r} takes {times[clients, ours] / took:.2f} times as long",
                    flush=True,
                )


if __name__ == "__main__":
    main()

"""Seconds of a FedAvg round of the network tables: as they are, with patches, compiled.

    python -m benchmarks.network_rounds [NAME ...] [--device cuda] [--precision tf32] [--quick]

NAME is femnist-cnn or fedmdfg-cifar10 (both by default), in the full form of its definition or in
the short one (``--quick``); CIFAR-10 is replaced by noise of the same shape. On a GPU the time of
its kernels is shown, too: it counts where several runs share the GPU. Patches are convolutions
written as products; what ``torch.compile`` makes of the network is ready after half a minute.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

from experiments.harness.experiment import definition
from torch.profiler import ProfilerActivity, profile

from equifed.runs import RunConfig, build_run, merge_tables

NAMES = ("femnist-cnn", "fedmdfg-cifar10")
NOISE = {"images": "synthetic", "samples": 10_000}
WARM = 3
"""Rounds that are not counted; before them as many of a first run: libraries load, memory is taken,
programs are compiled."""


def configured(name: str, engine: dict[str, Any], kind: str, quick: bool) -> RunConfig:
    """Return FedAvg's run of an experiment, never evaluated."""
    settings = definition(name, quick)
    table = merge_tables(settings["run"], settings["methods"]["FedAvg"])
    changes: dict[str, Any] = {"evaluate": {"splits": []}, "model": {"patches": kind == "patches"}}
    if name == "fedmdfg-cifar10" and not quick:
        changes["data"] = NOISE
    return RunConfig.from_dict(merge_tables(table, {
        **changes, "engine": {**engine, "compiled": kind == "compiled"},
    }))  # fmt: skip


def seconds_per_round(config: RunConfig, rounds: int) -> tuple[float, float]:
    """Return the time of a round on the clock, from a long run less a short one, and on the GPU."""
    built, taken, busy = build_run(config), [], 0.0
    for last in (WARM, WARM, WARM + rounds):
        one = RunConfig.from_dict(merge_tables(config.to_dict(), {"rounds": last}))
        started = time.perf_counter()
        replace(built, config=one).train()
        taken.append(time.perf_counter() - started)
    if config.engine["device"] != "cpu":
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            replace(built, config=one).train()
        busy = sum(row.self_device_time_total for row in seen.key_averages()) / 1e6
    return (taken[2] - taken[1]) / rounds, busy / (WARM + rounds)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(NAMES), metavar="NAME")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="full")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    engine = {"device": given.device, "precision": given.precision}
    print("| experiment | network | ms per round | of which the GPU |\n|---|---|---:|---:|")
    for name in given.names:
        for kind in ("plain", "patches", "compiled"):
            config = configured(name, engine, kind, given.quick)
            wall, gpu = seconds_per_round(config, given.rounds)
            print(f"| {name} | {kind} | {1e3 * wall:.1f} | {1e3 * gpu:.1f} |", flush=True)


if __name__ == "__main__":
    main()

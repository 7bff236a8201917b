"""Agreement of a deployment with the simulator: algorithms x privacy, on either kind of node.

    python -m benchmarks.flower.agreement                 # nodes of ours
    python -m benchmarks.flower.agreement --stock         # Flower's SuperNodes: an hour
    python -m benchmarks.flower.agreement --only scaff-pd --privacy secure

One SuperLink and two nodes with TLS and keys serve all runs, one after the other. Prints one JSON
line per run: the largest difference to the simulator, and the seconds. Exit code 1 if a run did not
end, or differs by more than 0 in clear, or by more than fixed point allows under hidden sums.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.flower.deployment import Trial

OBJECTIVE = '[algorithm.objective]\nname = "chi-square"\nrho = 0.5\n'
LOCAL = "[algorithm.local]\nlr = 0.05\nsteps = 5\n"
STEPS = '[algorithm.steps]\nname = "constant"\nprimal = 0.4\ndual = 0.1\n'
ALGORITHMS = {
    "scaff-pd": OBJECTIVE + LOCAL + STEPS,
    "fedavg": LOCAL,
    "drfa": "dual_step = 0.1\n" + OBJECTIVE + LOCAL,
    "scaff-pd-ia": LOCAL + STEPS,
}
LIMITS = {"none": 0.0, "secure": 1e-9}
"""Largest difference: none in clear; the rounding of fixed point, a few rounds of it, else."""


def main() -> int:
    """Run what is chosen and print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--stock", action="store_true", help="Flower's SuperNodes")
    parser.add_argument("--only", choices=ALGORITHMS, action="append")
    parser.add_argument("--privacy", choices=LIMITS, action="append")
    parser.add_argument("--rounds", type=int, default=3)
    chosen, good = parser.parse_args(), True
    with tempfile.TemporaryDirectory(prefix="equifed-") as temporary:
        trial = Trial(Path(temporary), 2, chosen.rounds, "penguins", stock=chosen.stock)
        head, _, _ = trial.toml.read_text().partition("[algorithm]")
        with trial.deployment as deployment:
            for name in chosen.only or ALGORITHMS:
                text = f'{head}[algorithm]\nname = "{name}"\n{ALGORITHMS[name]}'
                trial.toml.write_text(text + "[evaluate]\nsplits = []\n")
                for privacy in chosen.privacy or LIMITS:
                    trial.out = trial.root / f"{name}-{privacy}"
                    began = time.monotonic()
                    done = deployment.run(trial.root / "trial-app", trial.settings(privacy=privacy))
                    error = trial.error()
                    fine = error is not None and error <= LIMITS[privacy]
                    good = good and fine
                    told: dict[str, Any] = {"algorithm": name, "privacy": privacy, "error": error}
                    if error is None:
                        told["said"] = done.stdout[-1500:]
                    took = round(time.monotonic() - began, 1)
                    kind = "stock" if chosen.stock else "equifed"
                    print(json.dumps({**told, "kind": kind, "s": took, "good": fine}), flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

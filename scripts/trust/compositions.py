"""What drawn compositions certify, against an interior-point solver.

    python -m scripts.trust.compositions --count 600

Algorithms and wrappers of the catalogue, batch sizes, sampling, engines, precisions, own parts,
absent clients, interruptions and wrappers that the package does not know, as
``tests/training/test_compositions.py`` draws them. An excess is (true gap - certified gap) relative
to the optimum; above rounding it would be a false certificate.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from tests.training.test_compositions import Outcome, draw_composition, examine

from equifed.algorithms.around import unwrap
from equifed.data.describe import Table
from equifed.training import loop


def collect(seeds: range) -> dict[str, list[Outcome]]:
    """Return the outcomes of drawn compositions, by what they have in them."""
    found: dict[str, list[Outcome]] = defaultdict(list)
    for seed in seeds:
        drawn = draw_composition(seed)
        with tempfile.TemporaryDirectory() as folder:
            outcome = examine(seed, Path(folder))
        kinds = {"all", f"engine {drawn.engine}", *_wrappers(drawn.algorithm)}
        kinds.add(type(unwrap(drawn.algorithm)).__name__)
        kinds |= {"float32"} if drawn.dtype == torch.float32 else set()
        kinds |= {"own parts"} if drawn.own else set()
        kinds |= {"interrupted and resumed"} if drawn.broken else set()
        for kind in kinds:
            found[kind].append(outcome)
    return found


def _wrappers(algorithm: object) -> set[str]:
    """Return the names of everything around an algorithm."""
    inner = getattr(algorithm, "algorithm", None)
    if inner is None:
        return set()
    view = getattr(algorithm, "view", None)
    return {f"around: {type(algorithm).__name__ if view is None else view.__name__}"} | _wrappers(
        inner
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=600, help="compositions to draw")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    given = parser.parse_args()
    loop.CHECKPOINT_SECONDS = 0.0  # interrupted runs resume from the last round
    found = collect(range(given.first, given.first + given.count))
    rows = []
    for kind, outcomes in sorted(found.items(), key=lambda item: (-len(item[1]), item[0])):
        certified = [one for one in outcomes if one.certified]
        worst = max((one.excess for one in certified), default=None)
        refused = sum(one.why not in ("", "no certificate") for one in outcomes)
        told = "-" if worst is None else f"{worst:.1e}"
        rows.append((kind, len(outcomes), len(certified), refused, told))
    header = ("composition", "drawn", "certified", "refused by name", "largest excess")
    print(Table("certificates against the optimum", header, [tuple(map(str, r)) for r in rows]))


if __name__ == "__main__":
    main()

"""What a site that withdraws gets in writing: what it took part in, what is deleted, what stays."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

from equifed.flower.kept import Kept
from equifed.flower.results import slug
from equifed.training.files import write_file
from equifed.training.history import History
from equifed.training.tables import MODEL, PREPARATION


def write_withdrawal(folder: Path, site: str) -> Path:
    """Write the statement about a site into the run folder, and return where it is."""
    kept = Kept.read(folder)
    if site not in kept.names:
        raise ValueError(f"{site} is none of the clients of {folder}: {', '.join(kept.names)}.")
    path = folder / f"withdrawal-{slug(site)}.md"
    write_file(path, describe_withdrawal(folder, kept, site).encode())
    return path


def describe_withdrawal(folder: Path, kept: Kept, site: str) -> str:
    """Return the statement: facts of the run folder, and what follows from them."""
    history, at = History.load(folder, model=False), kept.names.index(site)
    taken = [r.round for r in history.rounds if r.clients is None or at in r.clients]
    sizes = kept.told["clients"][at]["sizes"]
    rows = ", ".join(f"{count} {split}" for split, count in sizes.items())
    named = sorted(
        str(p.relative_to(folder))
        for p in folder.rglob("*")
        if p.is_file() and not p.name.startswith("withdrawal-") and _names(p, site)
    )
    today = datetime.datetime.now(datetime.UTC)
    files = ", ".join(f"`{name}`" for name in named) or "none"
    return f"""# Withdrawal of {site} from the run {kept.run}

Written on {today:%Y-%m-%d %H:%M} UTC from the run folder `{folder.name}`.

**Took part** in {len(taken)} of {len(history.rounds)} rounds ({format_rounds(taken)}), with these
rows: {rows}. Privacy of the run: {kept.told["privacy"]}.

## What is deleted, and by whom

- At the site, by the site: what its node remembers (gradients of its own rows, secrets of its
  masks, the preparation), with `equifed flower clean MEMORY --days 0 --yes`. Its rows never left
  it. Its audit log and the model that it was given stay until it deletes them.
- On the server, by the operator, who has not done so by writing this: the files that name the
  site, with its number of rows, losses, weights, metrics and events ({files}).
  They are deleted with the folder, and the model with them.

## What stays

{_describe_rest(folder, site, taken)}
- Other folders of the same federation (parts that a later site began, copies, reports) need a
  statement of their own.
"""


def _describe_rest(folder: Path, site: str, taken: list[int]) -> str:
    lines = []
    model, prepared = folder / MODEL, folder / PREPARATION
    if not taken:
        lines.append(f"- No model of this run learned from {site}: it took part in no round.")
    elif model.exists():
        lines.append(
            f"- **The model keeps what it learned from {site}** (`{MODEL}`, sha256 {_sum(model)}), "
            "also every copy\n  that was delivered to others or exported. It cannot be taken out "
            "again."
        )
    else:
        lines.append("- The checkpoints of this unfinished run hold what they learned from it.")
    if prepared.exists():
        lines.append(
            f"- The preparation keeps its share in means, deviations and categories "
            f"(`{PREPARATION}`, sha256 {_sum(prepared)})."
        )
    lines.append("- Only a new run, without the site and not started from this one, is free of it.")
    return "\n".join(lines)


def format_rounds(rounds: list[int]) -> str:
    """Return rounds as people write them.

    >>> format_rounds([1, 2, 3, 5, 7, 8])
    '1 to 3, 5, 7 to 8'
    >>> format_rounds([])
    'none'
    """
    spans: list[list[int]] = []
    for r in rounds:
        if spans and spans[-1][-1] == r - 1:
            spans[-1] = [spans[-1][0], r]
        else:
            spans.append([r])
    return ", ".join(" to ".join(map(str, span)) for span in spans) or "none"


def _names(path: Path, site: str) -> bool:
    return site.encode() in path.read_bytes()


def _sum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

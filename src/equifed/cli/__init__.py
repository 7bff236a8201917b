# ruff: noqa: F401 - imported for type checkers
"""The command line; what a command needs is loaded when it first uses it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from equifed import report as reports
    from equifed import training
    from equifed.contract import arrays
    from equifed.data import columns as columns_of
    from equifed.data import describe as describing
    from equifed.data import infer
    from equifed.datasets import registry
    from equifed.models import export as exports
    from equifed.privacy import clients as private
    from equifed.privacy import ledger
    from equifed.runs import candidates, catalogue, comparison
    from equifed.runs import config as configs
    from equifed.runs import evidence as evidence_of
    from equifed.runs import fit as fitting
    from equifed.runs import init as first_look
    from equifed.runs import load as loading
    from equifed.runs import run as runs
    from equifed.runs import schema as schemas
    from equifed.training import checkpoint, files, keys
    from equifed.training import show as shown

MODULES = {
    "np": "numpy", "reports": "equifed.report", "training": "equifed.training",
    "arrays": "equifed.contract.arrays", "columns_of": "equifed.data.columns",
    "describing": "equifed.data.describe", "infer": "equifed.data.infer",
    "registry": "equifed.datasets.registry", "exports": "equifed.models.export",
    "private": "equifed.privacy.clients", "ledger": "equifed.privacy.ledger",
    "candidates": "equifed.runs.candidates",
    "catalogue": "equifed.runs.catalogue", "comparison": "equifed.runs.comparison",
    "configs": "equifed.runs.config", "evidence_of": "equifed.runs.evidence",
    "fitting": "equifed.runs.fit", "first_look": "equifed.runs.init",
    "loading": "equifed.runs.load", "runs": "equifed.runs.run", "schemas": "equifed.runs.schema",
    "checkpoint": "equifed.training.checkpoint", "files": "equifed.training.files",
    "keys": "equifed.training.keys", "shown": "equifed.training.show",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Load a module when it is first used, so that ``equifed --help`` answers at once."""
    if name not in MODULES:
        raise AttributeError(name)
    return importlib.import_module(MODULES[name])

"""The command line; what a command needs is loaded when it first uses it."""

import importlib
from typing import Any


class Lazy:
    """A module that is loaded when it is first used, so that ``equifed --help`` answers at once."""

    def __init__(self, address: str) -> None:
        self.address = address

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self.address), name)


np = Lazy("numpy")
arrays = Lazy("equifed.contract.arrays")
columns_of, describing = Lazy("equifed.data.columns"), Lazy("equifed.data.describe")
infer, registry = Lazy("equifed.data.infer"), Lazy("equifed.datasets.registry")
exports, reports = Lazy("equifed.models.export"), Lazy("equifed.report")
budget, plans = Lazy("equifed.privacy.budget"), Lazy("equifed.privacy.plan")
catalogue, comparison = Lazy("equifed.runs.catalogue"), Lazy("equifed.runs.comparison")
configs, evidence_of = Lazy("equifed.runs.config"), Lazy("equifed.runs.evidence")
first_look, fitting = Lazy("equifed.runs.init"), Lazy("equifed.runs.fit")
loading, runs = Lazy("equifed.runs.load"), Lazy("equifed.runs.run")
schemas = Lazy("equifed.runs.schema")
training, checkpoint = Lazy("equifed.training"), Lazy("equifed.training.checkpoint")
files, keys = Lazy("equifed.training.files"), Lazy("equifed.training.keys")
shown = Lazy("equifed.training.show")

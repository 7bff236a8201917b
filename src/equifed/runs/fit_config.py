"""``fit`` of what a configuration file describes: its data, and its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from equifed.contract.local import LocalSGD
from equifed.data.federation import Federation
from equifed.models.architectures import MODELS
from equifed.models.losses import outputs_for, resolve_loss
from equifed.runs.build import build_module, load_data
from equifed.runs.config import ModelSettings, RunConfig, build_algorithm
from equifed.runs.fit import Served, fit
from equifed.runs.network_fit import is_network
from equifed.runs.schema import AUTO, ConfigError, settings

WORK = {"lr": AUTO, "steps": 10, "batch_size": 50, "proximal": 0.0, "correction": 1.0}
"""What is written where nothing was said of local work: its step size is measured."""


def fit_config(config: RunConfig, out: Path, **more: Any) -> Served:
    """Choose for the data and the model of a configuration; of its algorithm the work is taken.

    ``more`` is as for :func:`equifed.fit`. A network with settings of the catalogue is in the
    folder with them, for ``equifed predict``.
    """
    shared, usual = settings(ModelSettings), vars(ModelSettings())
    if odd := [key for key in shared if config.model.get(key, usual[key]) != usual[key]]:
        raise ConfigError(
            [f"model.{odd[0]}: fit tries penalties and own parts itself; leave this out"]
        )
    if config.privacy is not None:
        raise ConfigError(["privacy: fit takes it from --epsilon and the bounds, for a table"])
    data = load_data(config.data)
    outputs = outputs_for(data, resolve_loss(AUTO, data.classes))
    module = build_module(config, data.input_shape, outputs)
    if not is_network(module, data):
        return fit(data, seed=config.seed, out=out, **more)
    given: dict[str, Any] = {"rounds": config.rounds, "local": _read_work(config, data)}
    served = fit(data, seed=config.seed, out=out, model=module, **given, **more)
    name = config.model["name"]
    if name in MODELS:
        params = {key: value for key, value in config.model.items() if key not in ("name", *shared)}
        for run in served.runs.values():
            run.provenance |= {"model_name": name, "model_params": params}
            run.provenance["samples"] |= {"outputs": outputs}
        served.save(out, overwrite=True)
    return served


def _read_work(config: RunConfig, data: Federation) -> LocalSGD | None:
    """Return the local work that the algorithm has; None where its step size is to be measured."""
    told = config.algorithm.get("local")
    if told in (None, WORK):
        return None
    if told["lr"] == AUTO:
        raise ConfigError(["algorithm.local.lr: fit measures it for its usual work; give a number"])
    algorithm: Any = build_algorithm(config.algorithm, data.train.sizes.tolist())
    local: LocalSGD = algorithm.local
    return local

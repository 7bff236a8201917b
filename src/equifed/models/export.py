"""A predictor as files that need no configuration, no data and, but for the first, no equifed.

``predictor.json`` and ``preparation.json`` say how a table becomes features, and scores classes;
``model.safetensors`` are the weights, ``model.pt2`` (``torch.export.load``) and ``model.onnx``
programs that map prepared features to scores, or to values in the unit of the target column.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from torch.utils._pytree import tree_map

from equifed.data.preparation import Target
from equifed.models.adapted import Adapted, take_logits, unpack
from equifed.models.predictor import Predictor, find_dtype

DESCRIPTION, PREPARATION, WEIGHTS = "predictor.json", "preparation.json", "model.safetensors"
PROGRAM, ONNX = "model.pt2", "model.onnx"
FORMAT = 1


def export(
    predictor: Predictor, folder: str | Path, *, program: bool = False, onnx: bool = False
) -> list[Path]:
    """Write a predictor into a folder, and return the files.

    Its module becomes a ``program`` of ``torch.export``, too, and an ``onnx`` model, if asked for.
    """
    if predictor.own:
        names = ", ".join(predictor.clients[:12])
        raise ValueError(
            f"The model has own parts ({', '.join(predictor.own)}), so it differs from client to "
            "client; export one client's (--client NAME, predictor.for_client(NAME)): there are "
            f"{names}."
        )
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    files = {DESCRIPTION: describe(predictor)}
    if predictor.preparation is not None:
        files[PREPARATION] = predictor.preparation.to_json()
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    weights = {name: p.contiguous().clone() for name, p in predictor.module.state_dict().items()}
    save_file(weights, out / WEIGHTS)
    if program:
        torch.export.save(_trace(predictor), out / PROGRAM)
    if onnx:
        _write_onnx(predictor, out / ONNX)
    asked = {WEIGHTS: True, PROGRAM: program, ONNX: onnx}
    return [out / name for name in (*files, *(name for name, there in asked.items() if there))]


def describe(predictor: Predictor) -> dict[str, Any]:
    """Return all about a predictor but its module and preparation, as JSON has it."""
    prepared, dtype = predictor.preparation, find_dtype(predictor.module)
    return {
        "format": FORMAT,
        "input_shape": list(predictor.input_shape),
        "layout": None if predictor.layout is None else predictor.layout.to_json(),
        "feature_names": None if prepared is None else list(prepared.feature_names),
        "input_dtype": "int64" if predictor.tokens else str(dtype).removeprefix("torch."),
        "classes": None if predictor.classes is None else list(predictor.classes),
        "link": predictor.link,
        "clients": list(predictor.clients),
        "target_shape": list(predictor.outputs_shape),
        "target_scale": None
        if prepared is None
        else [prepared.target.centre, prepared.target.scale],
        "only": predictor.only,
        "preparation_sha256": None if prepared is None else prepared.digest(),
    }


class _Scores(nn.Module):
    """A module without what it returns beside scores; values in the unit of the target column."""

    def __init__(self, module: nn.Module, target: Target | None) -> None:
        super().__init__()
        self.module, self.target = module, target

    def forward(self, features: Any) -> Any:
        adapted = isinstance(self.module, Adapted)
        answer: Any = self.module.equifed_answer if adapted else self.module
        scores = take_logits(answer(features))
        return scores if self.target is None else self.target.decode(scores)


def _make_example(predictor: Predictor) -> Any:
    """Return two samples of zeros: a program that saw one row may be for one row alone."""
    kind = torch.int64 if predictor.tokens else find_dtype(predictor.module)
    rows = torch.zeros(2, *predictor.input_shape, dtype=kind)
    return rows if predictor.layout is None else unpack(predictor.layout, rows)


def _trace(predictor: Predictor) -> torch.export.ExportedProgram:
    """Return the module as a program for any number of rows."""
    rows, given = {0: torch.export.Dim("rows", min=1)}, _make_example(predictor)
    shapes = tree_map(lambda _: rows, given)
    target = None if predictor.preparation is None else predictor.preparation.target
    module = _Scores(predictor.module, target if target and target.is_scaled else None)
    try:
        with warnings.catch_warnings():  # about weights that an LSTM lists twice
            warnings.filterwarnings("ignore", "The tensor attributes", UserWarning)
            return torch.export.export(module, (given,), dynamic_shapes=(shapes,))
    except Exception as error:
        raise ValueError(
            f"torch.export cannot make a program of {type(predictor.module).__name__}: "
            f"{str(error).splitlines()[0][:200]}"
        ) from error


def _write_onnx(predictor: Predictor, path: Path) -> None:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise ValueError(
            "ONNX models need the packages onnx and onnxscript: pip install 'equifed[onnx]'."
        ) from None
    fields = () if predictor.layout is None else predictor.layout.fields
    names = [field.name for field in fields] or ["features"]
    torch.onnx.export(
        _trace(predictor), (), path, input_names=names, output_names=["scores"],
        external_data=False, verbose=False,
    )  # fmt: skip

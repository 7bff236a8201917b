"""Federations on disk: one file of numbers per array, memory-mapped, and ``federation.json``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np

from equifed.data.federation import Federation
from equifed.data.fields import Layout, compare_layouts, find_fields, pack
from equifed.data.split import Array, DataError, Split

INDEX = "federation.json"
FORMAT = 1


class FederationWriter:
    """Write a federation client by client; it is complete when the block ends.

    Parameters
    ----------
    folder : path
        A folder that holds no federation yet.
    name : str
        Name of the data set.
    classes : int, optional
        Number of classes; None for regression.
    class_names : sequence of str
        Names of the classes; empty, or one each.

    Examples
    --------
    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "data"
    >>> with FederationWriter(folder, classes=2) as writer:
    ...     for client in ("north", "south"):
    ...         writer.add(client, train=(np.zeros((3, 2)), np.array([0, 1, 1])))
    >>> open_federation(folder)
    <Federation 'your data': 2 clients; samples: train 6>
    """

    def __init__(
        self, folder: str | Path, *, name: str = "your data", classes: int | None = None,
        class_names: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self._folder = Path(folder)
        if (self._folder / INDEX).exists():
            raise DataError(f"{self._folder} holds a federation; choose another folder.")
        self._about: dict[str, Any] = {"name": name, "classes": classes}
        self._about["class_names"] = tuple(class_names)
        self._first: Federation | None = None
        self._sizes: dict[str, dict[str, int]] = {}  # client to split to rows
        self._files: dict[str, BinaryIO] = {}
        self._digest = hashlib.sha256()

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        return self

    def add(self, client: str, **splits: tuple[Any, Any]) -> None:
        """Add a client: ``train=(X, y)`` and, like all others, ``validation=`` and ``test=``.

        X may be a mapping or a tuple of arrays, as for :meth:`Federation.from_clients`.
        """
        if client in self._sizes:
            raise DataError(f"Client {client!r} was added before; names are unique.")
        held, layouts = dict[str, Any](), list[Layout | None]()
        for label, (x, y) in splits.items():
            fields = find_fields(x, len(y), where := f"Client {client!r}: {label} X")
            rows, layout = (x, None) if fields is None else pack(fields, where, len(y))
            held[label] = Split.from_clients([(rows, y)])
            layouts.append(layout)
        one = Federation(names=(client,), layout=next(iter(layouts), None), **self._about, **held)
        self._first = first = self._first or one
        for layout in layouts:
            compare_layouts(first.layout, layout, f"Client {client!r}: X", "the first client's X")
        if set(one.splits()) != set(first.splits()):
            raise DataError(
                f"Client {client!r} has the splits {', '.join(one.splits())}, the first one "
                f"{', '.join(first.splits())}; give all of them the same."
            )
        try:
            one.train.check_like("train", first.train)
        except DataError as error:
            raise DataError(f"Client {client!r} differs from the first one: {error}") from None
        self._sizes[client] = {label: len(split) for label, split in one.splits().items()}
        for name, array in _list_arrays(one).items():
            if name not in self._files:
                self._files[name] = (self._folder / f"{name}.bin").open("wb")
            data = np.ascontiguousarray(array).tobytes()
            self._files[name].write(data)
            self._digest.update(f"{client} {name} {array.shape}".encode() + data)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for file in self._files.values():
            file.close()
        if kind is not None:
            return
        if self._first is None:
            raise DataError("A federation needs clients; none was added.")
        layout, arrays = self._first.layout, _list_arrays(self._first)
        if layout is not None:
            self._digest.update(repr(layout).encode())
        told = {
            "format": FORMAT,
            **self._about,
            "clients": list(self._sizes),
            "sizes": {k: [mine[k] for mine in self._sizes.values()] for k in self._first.splits()},
            **({} if layout is None else {"layout": layout.to_json()}),
            "arrays": {
                name: {"dtype": str(array.dtype), "shape": list(array.shape[1:])}
                for name, array in arrays.items()
            },
            "sha256": self._digest.hexdigest(),
        }
        (self._folder / INDEX).write_text(json.dumps(told) + "\n")


def _list_arrays(federation: Federation) -> dict[str, Array]:
    """Return the arrays of a federation by the names of their files."""
    return {
        f"{label}-{kind}": getattr(split, kind)
        for label, split in federation.splits().items()
        for kind in ("inputs", "targets")
    }


def open_federation(path: str | Path) -> Federation:
    """Open the folder that a :class:`FederationWriter` wrote, without reading the samples.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp()) / "data"
    >>> with FederationWriter(folder, classes=2) as writer:
    ...     writer.add("north", train=(np.ones((3, 2)), np.array([0, 1, 1])))
    >>> open_federation(folder).names
    ('north',)
    """
    folder = Path(path)
    try:
        told = json.loads((folder / INDEX).read_text())
        if told["format"] != FORMAT:
            raise DataError(f"{folder / INDEX} has format {told['format']}, known is {FORMAT}.")
        splits: dict[str, Any] = {k: _open_split(folder, k, told) for k in told["sizes"]}
        names, shown = tuple(map(str, told["clients"])), tuple(map(str, told["class_names"]))
        return Federation(
            str(told["name"]), names, classes=told["classes"], class_names=shown,
            source={"folder": folder.name}, sha256=str(told["sha256"]),
            layout=Layout.from_json(told.get("layout")), **splits,
        )  # fmt: skip
    except FileNotFoundError as error:
        raise DataError(
            f"{folder} holds no federation: {Path(str(error.filename)).name} is missing. Write one "
            "with equifed.data.FederationWriter."
        ) from None
    except DataError:
        raise
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{folder / INDEX} cannot be read ({error}); write it again.") from None


def _open_split(folder: Path, label: str, told: Mapping[str, Any]) -> Split:
    offsets = np.cumsum([0, *told["sizes"][label]], dtype=np.int64)
    arrays = []
    for kind in ("inputs", "targets"):
        about, file = told["arrays"][f"{label}-{kind}"], folder / f"{label}-{kind}.bin"
        dtype, shape = np.dtype(about["dtype"]), (int(offsets[-1]), *map(int, about["shape"]))
        wanted, found = int(np.prod(shape)) * dtype.itemsize, file.stat().st_size
        if found != wanted:
            raise DataError(f"{file} has {found} bytes, not {wanted}; write the federation again.")
        # Copy on write: torch takes arrays that it may write to. Nothing cannot be mapped.
        mapped = np.memmap(file, dtype, "c", shape=shape) if wanted else np.empty(shape, dtype)
        arrays.append(mapped)
    return Split(arrays[0], arrays[1], offsets)


def standardise(federation: Federation, columns: Sequence[int] | None = None) -> Federation:
    """Shift and scale feature columns to mean 0 and deviation 1 over all training samples.

    One mean and one deviation for all clients: clients send only sums and sums of squares, and
    differences between clients stay visible to the model. A constant column is only shifted.
    Held-out samples are transformed with the training numbers.

    >>> X = np.array([[0.0], [2.0]])
    >>> fed = Federation.from_clients({"a": (X, [0, 1])}, test={"a": (X + 2, [0, 1])})
    >>> standardise(fed).train.inputs.ravel(), standardise(fed).test.inputs.ravel()
    (array([-1.,  1.]), array([1., 3.]))
    """
    if federation.layout is not None:
        raise DataError(f"A sample is {federation.layout}; standardise its arrays before.")
    chosen = slice(None) if columns is None else list(columns)
    train = federation.train.inputs[:, chosen].astype(np.float64)
    mean, deviation = train.mean(0), train.std(0)
    deviation = np.where(deviation > 1e-12 * np.maximum(1, np.abs(mean)), deviation, 1.0)

    def scale(inputs: Array) -> Array:
        scaled = inputs.copy()
        scaled[:, chosen] = (inputs[:, chosen] - mean) / deviation
        return scaled

    return federation.with_inputs({k: scale(s.inputs) for k, s in federation.splits().items()})

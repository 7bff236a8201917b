"""The data of all clients: who they are, their samples, and what is held out.

A :class:`Federation` holds a training split and, where there are any, validation and test splits.
Everything is checked when it is built, so that an engine never meets a NaN, an empty client or a
label that the model has no output for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from equifed.contract.arrays import show_text
from equifed.data.arrays import Clients, align_clients
from equifed.data.describe import Table
from equifed.data.fields import Layout, Padding, pad_clients
from equifed.data.items import Named, take_items
from equifed.data.preparation import Missing, Preparation, Prepare
from equifed.data.split import (
    Array,
    DataError,
    Holdout,
    Split,
    check_names,
    divide_at_random,
    refuse,
)


@dataclass(frozen=True, eq=False)
class Federation:
    """Named clients with their training samples and, where given, validation and test samples.

    Building one checks it: unique names; finite features; every client with at least one training
    sample; one feature shape and dtype for all; labels in ``0..classes - 1``, or floats when
    ``classes`` is None. A client may lack validation or test samples; its metrics are then
    undefined.

    Parameters
    ----------
    name, names
        Of the data set, and of its clients in the order of the splits.
    train, validation, test : Split
        Samples; the last two are optional.
    classes, class_names
        How many there are, None for a regression, and their names: none, or one each.
    source : dict
        Provenance, for the report: publisher, licence, checksums, how it was prepared.
    preparation : Preparation, optional
        How a table became these features; prepares new rows in the same way.
    layout : Layout, optional
        The arrays that a row of inputs holds, where a sample consists of several.
    divided : str, optional
        Which split each row of the table is in, as ``split.csv`` of a run folder has it.
    sha256 : str
        Checksum of samples that lie in files, and were checked when they were written.

    Examples
    --------
    >>> X = np.arange(6.0).reshape(3, 2)
    >>> fed = Federation.from_clients({"north": (X, [0, 1, 1]), "south": (X + 1, [1, 0, 1])})
    >>> fed.names, fed.classes, fed.train.sizes
    (('north', 'south'), 2, array([3, 3]))
    >>> print(fed.table())
    your data: 2 clients
    client  train  class 0  class 1
    north       3        1        2
    south       3        1        2
    all         6        2        4
    """

    name: str
    names: tuple[str, ...]
    train: Split
    validation: Split | None = None
    test: Split | None = None
    classes: int | None = None
    class_names: tuple[str, ...] = ()
    source: dict[str, str] = field(default_factory=dict)
    preparation: Preparation | None = None
    layout: Layout | None = None
    divided: str | None = None
    sha256: str = ""

    def __post_init__(self) -> None:
        check_names(self.names, self.classes, self.class_names)
        for label, split in self.splits().items() if not self.sha256 else ():
            split.check(label, self.names, self.classes)
            split.check_like(label, self.train)

    def __len__(self) -> int:
        return len(self.names)

    def __repr__(self) -> str:
        sizes = ", ".join(f"{label} {len(split)}" for label, split in self.splits().items())
        return f"<Federation {self.name!r}: {len(self)} clients; samples: {sizes}>"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the clients with their samples."""
        return self.table()._repr_html_()

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample's features; () for a single number."""
        return self.train.inputs.shape[1:]

    def splits(self) -> dict[str, Split]:
        """Return the splits there are, by name: train, then validation and test."""
        held = {"train": self.train, "validation": self.validation, "test": self.test}
        return {label: split for label, split in held.items() if split is not None}

    # -- your arrays and tables -----------------------------------------------------------------

    @classmethod
    def from_clients(
        cls,
        clients: Clients | Any,
        *,
        validation: Clients | float | Any | None = None,
        test: Clients | float | Any | None = None,
        seed: int = 0,
        client: str | None = None,
        features: str | Sequence[str] | None = None,
        target: str | None = None,
        name: str = "your data",
        task: Literal["classification", "regression"] | None = None,
        classes: int | None = None,
        class_names: Sequence[str] = (),
        tokens: bool = False,
        dtype: str | None = None,
        pad: float | Mapping[str, float] | None = None,
        mask: str | None = None,
        source: Mapping[str, str] | None = None,
    ) -> Federation:
        """Build from ``{client name: (X, y)}`` or ``{client name: data set}``.

        Text and booleans are classes (text is numbered in sorted order and becomes
        ``class_names``), floats are values to regress on. Whole numbers are labels when they are
        0..K - 1, all of them present, with K up to 20; where they could as well be values (ages,
        counts, 1 and 2), ``task`` or ``classes`` must say what they are. What cannot be taken over
        unchanged is refused with a :class:`DataError`: masked or missing values, text among
        numbers, X without columns, data frames whose columns differ.

        X may be a mapping or a tuple of arrays, ``{"input_ids": ..., "attention_mask": ...}``: the
        model's ``forward`` gets them by name (or in order), whole numbers as int64.

        A data set is one of torch (with a length), a ``DataLoader`` (its data set is taken, with
        its ``collate_fn``) or one of Hugging Face; its items are ``(x, y)``, where x may be several
        arrays, or named columns. Items are read once: random transforms are drawn once. Features of
        more than 2 GB go to an unnamed file in the folder for temporary files, memory-mapped.

        Parameters
        ----------
        clients, validation, test : mapping of client to (X, y), (X, y, groups) or a data set
            ``groups`` names a group for each sample (a sex), which metrics are told by. Held-out
            mappings may lack clients. 1 and ``"1"`` are two clients, ``1`` and ``'1'``. One Hugging
            Face data set will do, with ``client``, or a partitioner of flwr-datasets. A number
            holds out that fraction of every client's samples, drawn with ``seed``.
        client, features, target : str
            Columns of the items: whose an item is, its features (one column, several numbers or
            several arrays) and its target; by default ``label``, ``labels``, ``target`` or ``y``,
            and what a tokenizer makes (``input_ids``, ...) or else the only other column.
        task : {"classification", "regression"}, optional
            What whole numbers are. As classes they are numbered in sorted order, unless they are
            0..K - 1 already.
        classes : int, optional
            Number of classes when labels are 0..classes - 1 and some of them may be absent.
        tokens : bool
            The features are indices of tokens (kept as int64), not numbers.
        dtype : {"float32", "float64"}, optional
            Of the features; by default they keep their precision, and whole numbers become floats
            like those of the other clients, or float32.
        pad : number or mapping of column to number, optional
            Fill up sequences of unequal length with this, at their end, to the longest one of all
            clients and splits; ``attention_mask`` with 0 unless named. New rows likewise.
        mask : str, optional
            With ``pad``: add an array of this name, 0 for what was filled in and 1 elsewhere.
        name, class_names, source
            Of the data set; its classes; its provenance, for the report.

        Examples
        --------
        >>> clients = {"a": ([[0.5], [1.5]], ["no", "yes"]), "b": ([[2.5]], ["yes"])}
        >>> Federation.from_clients(clients).class_names
        ('no', 'yes')
        """
        given = {"validation": validation, "test": test}
        shares = {k: v for k, v in given.items() if isinstance(v, int | float)}
        held = {"train": clients, **{k: v for k, v in given.items() if k not in shares}}
        named, holdout = Named(client, features, target), Holdout(**shares, seed=seed)
        if mask is not None and pad is None:
            raise DataError(f"mask={mask!r} says where sequences were filled up; give pad=0, too.")
        held, holdout, titles = take_items(held, named, holdout, tokens, dtype, pad is not None)
        held = held if pad is None else pad_clients(held, Padding(pad, mask))
        if titles and not class_names and task != "regression":
            class_names, classes = titles, classes or len(titles)
        aligned = align_clients(held, classes, class_names, task, tokens, dtype)
        made = cls(name, **aligned, source=dict(source or {}))
        return made.split(holdout.validation, holdout.test, seed) if holdout.wanted else made

    @classmethod
    def from_table(
        cls,
        table: Any | str | Path,
        client: str,
        target: str,
        *,
        features: Sequence[str] | None = None,
        scale: Literal["standard"] | None = "standard",
        missing: Missing = "indicator",
        categorical: Literal["auto"] | Sequence[str] = "auto",
        numeric: Sequence[str] = (),
        unknown: Literal["other", "error"] = "other",
        min_count: int = 5,
        per_client: bool = False,
        target_scale: Literal["standard"] | None = "standard",
        test: float = 0.0,
        validation: float = 0.0,
        seed: int = 0,
        keep_together: str | None = None,
        time: str | None = None,
        split: str | None = None,
        report_by: str | None = None,
        task: Literal["classification", "regression"] | None = None,
        classes: int | None = None,
        name: str | None = None,
        dtype: str = "float32",
        source: Mapping[str, str] | None = None,
    ) -> Federation:
        """Build from a table in which one column says whose row it is.

        Rows are divided first; the :class:`~equifed.data.preparation.Preparation` (scales, fill
        values, categories) is fitted on training rows, by adding numbers per client, and kept.
        Rows without a client or target are left out with a :class:`DataWarning` (refused with
        ``missing="error"``); held-out rows that equal a training row are warned of.

        Parameters
        ----------
        table : path, DataFrame, pyarrow.Table or mapping of columns
            A CSV file with a header line (UTF-8; separated by commas, semicolons, tabs or bars; it
            may be compressed by gzip), a Parquet file (needs pyarrow), or an object with named
            columns. Text is taken without blanks around it; empty, ``NA``, ``NaN`` and ``?`` are
            gaps.
        client, target : str
            Columns with the client's name and with what is to be predicted. The clients 1 and
            ``"1"`` of a data frame stay apart, called ``1`` and ``'1'``.
        features : sequence of str, optional
            Columns to predict from; by default all others but identifiers (texts that are all
            different, whole numbers that count rows), dates and columns without a value, which are
            left out with a warning.
        scale, missing, categorical, numeric, unknown, min_count, per_client, target_scale
            How columns become features and targets: :class:`~equifed.data.preparation.Prepare`.
        test, validation, seed
            Fractions of every client's rows to hold out, and the seed of the draw.
        keep_together : str, optional
            Column whose rows of one value (a patient) stay in one split.
        time : str, optional
            Column with numbers or ISO dates: a client's held-out rows are later than its others.
        split : str, optional
            Column with ``train``, ``validation`` or ``test``, in place of fractions; or the
            ``split.csv`` that a run on this table has left, to repeat its split.
        report_by : str, optional
            Column by whose values (a sex, an age band) metrics inside clients are told, too. It
            stays a feature unless ``features`` leaves it out, and keeps no rows together.
        task : {"classification", "regression"}, optional
            By default, numbers that are not all whole are values to regress on, text is classes.
            Two whole numbers, or up to 20 that follow each other, are classes; others could be
            either, and need a task.
        classes : int, optional
            Number of classes, when labels are 0..classes - 1; else they are numbered in order.
        name, dtype, source
            As for :meth:`from_clients`.

        Examples
        --------
        >>> table = {"site": ["n", "n", "s"], "age": [50, 61, 42], "ill": ["no", "yes", "no"]}
        >>> fed = Federation.from_table(table, client="site", target="ill")
        >>> fed, fed.preparation.columns[0].centre
        (<Federation 'your data': 2 clients; samples: train 3>, 51.0)
        """
        # a federation needs no reader of tables
        from equifed.data.table import TableRequest, read_table

        wanted = (features,) if isinstance(features, str) else features
        columns: dict[str, Any] = {
            "split": split, "keep_together": keep_together, "time": time, "report_by": report_by,
        }  # fmt: skip
        rules: Any = (
            scale, missing, categorical, unknown, min_count, per_client, target_scale, numeric
        )  # fmt: skip
        request = TableRequest(
            str(client), str(target), None if wanted is None else tuple(wanted),
            **{k: None if column is None else str(column) for k, column in columns.items()},
            task=task, classes=classes, holdout=Holdout(validation, test, seed),
            prepare=Prepare(*rules),
        )  # fmt: skip
        clients, fitted, told, divided = read_table(table, request)
        about = {"preparation": fitted.describe(), **(source or {})}
        if told:
            about["rows and columns"] = "; ".join(told)
        title = name or (Path(table).stem if isinstance(table, str | Path) else "your data")
        made = cls.from_clients(**clients, name=title, dtype=dtype, source=about)
        return replace(made, preparation=fitted, divided=divided)

    # -- derived federations --------------------------------------------------------------------

    def subset(self, clients: Iterable[str | int]) -> Federation:
        """Return the federation of some clients, by name or position, in the order given."""
        known: dict[Any, int] = {k: k for k in range(len(self))}
        known |= {name: i for i, name in enumerate(self.names)}
        asked = list(clients)
        refuse(
            (client for client in asked if client not in known),
            lambda client: (
                f"There is no client {client!r}; there are {', '.join(self.names[:12])}, or "
                f"positions in 0..{len(self) - 1}."
            ),
        )
        index = [known[client] for client in asked]
        if not index or len(set(index)) != len(index):
            raise DataError(f"A subset needs at least one client and no repeats, got {index}.")
        held: dict[str, Any] = {
            label: split.take([np.arange(split.offsets[i], split.offsets[i + 1]) for i in index])
            for label, split in self.splits().items()
        }
        names = tuple(self.names[i] for i in index)
        return replace(self, names=names, divided=None, sha256="", **held)

    def in_units(self, values: Any) -> Any:
        """Return values of a regression, as arrays or tensors, in the unit of the target column."""
        return values if self.preparation is None else self.preparation.target.decode(values)

    def with_inputs(self, inputs: Mapping[str, Array]) -> Federation:
        """Return the federation with other features, by split, for the same samples.

        The preparation of a table is not kept; values of a regression are in their own unit again.
        """
        held: dict[str, Any] = {
            label: replace(split, inputs=inputs[label], targets=self.in_units(split.targets))
            for label, split in self.splits().items()
        }
        return replace(self, **held, preparation=None, layout=None, sha256="")

    def split(self, validation: float = 0.0, test: float = 0.0, seed: int = 0) -> Federation:
        """Hold out a fraction of every client's training samples.

        A client with m samples gives ``round(test * m)`` of them to the test split and
        ``round(validation * m)`` to the validation split, drawn without replacement from the
        address ``("split", client name)``: the same samples whatever other clients there are. At
        least one sample stays in training.
        """
        holdout = Holdout(validation, test, seed)
        asked = {"validation": validation, "test": test}
        refuse(
            (label for label, share in asked.items() if share > 0 and label in self.splits()),
            lambda label: f"{self.name} already has a {label} split; ask for {label}=0 to keep it.",
        )
        if self.preparation is not None and self.preparation.is_fitted:
            raise DataError(
                f"{self.name} was scaled and filled with numbers of all its rows: what is held out "
                "now would have leaked; give test= and validation= to from_table."
            )
        every = self.train.rows()
        part = divide_at_random(dict(zip(self.names, every, strict=True)), holdout)
        parts: dict[str, Any] = {
            label: self.train.take([rows[part[rows] == label] for rows in every])
            for label in ("train", *(label for label, share in asked.items() if share > 0))
        }
        return replace(self, divided=None, sha256="", **parts)

    # -- description ----------------------------------------------------------------------------

    def find_one_class(self) -> list[str]:
        """Return the clients whose training samples are of one class; none of a regression."""
        if self.classes is None:
            return []
        labels = (self.train.client(i)[1] for i in range(len(self)))
        pairs = zip(self.names, labels, strict=True)
        return [name for name, mine in pairs if len(np.unique(mine)) == 1]

    def checksum(self) -> str:
        """Return the SHA-256 of names, classes, arrays, dtypes and offsets."""
        if self.sha256:
            return self.sha256
        about = self.names, self.classes, self.class_names
        told = about if self.layout is None else (*about, self.layout)
        digest = hashlib.sha256(repr(told).encode())
        for label, split in self.splits().items():
            for array in (split.inputs, split.targets, split.offsets):
                little = array.astype(array.dtype.newbyteorder("<"), copy=False)
                digest.update(f"{label} {little.dtype.str} {array.shape}".encode())
                digest.update(np.ascontiguousarray(little).data)
            if split.groups is not None:
                digest.update(repr(split.groups.tolist()).encode())
        return digest.hexdigest()

    def table(self) -> Table:
        """Return the clients as rows: sizes of the splits and class counts of the training split.

        With more than twelve classes, the number of classes present stands for the counts.
        """
        columns = {label: (split.sizes, len(split)) for label, split in self.splits().items()}
        if self.classes is not None:
            counts = self.train.class_counts(self.classes)
            if self.classes <= 12:
                titles = self.class_names or [f"class {k}" for k in range(self.classes)]
                columns |= {t: (n, int(n.sum())) for t, n in zip(titles, counts.T, strict=True)}
            else:
                columns["classes"] = (counts > 0).sum(1), int(counts.any(0).sum())
        rows = [
            (show_text(name), *(str(values[i]) for values, _ in columns.values()))
            for i, name in enumerate(self.names)
        ]
        totals = "all", *(str(total) for _, total in columns.values())
        header = "client", *map(show_text, columns)
        return Table(f"{self.name}: {len(self)} clients", header, rows, totals)

"""Folders and files that a stranger may have made: real runs, and what can be done to them.

Whoever changes a folder can renew its checksums, so everything here does, but for what says not to.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
import torch
from safetensors.torch import load, save
from typer.testing import CliRunner

import equifed as ef
from equifed.cli.main import app
from equifed.training import loop
from equifed.training.files import SEAL, digest, seal
from equifed.training.tables import CHECKSUMS, CONFIG, FILES, RUN, SUMMARY
from equifed.training.trackers import Callback

SECRET = "the owner's private key"


class _Dies(Callback):
    def evaluation(self, round: int, records: Any) -> None:  # type: ignore[override]
        if round == 2:
            raise KeyboardInterrupt


def draw_rows(count: int, seed: int = 0) -> dict[str, list[Any]]:
    """Return a table of two sites with numbers, a gap, categories and a target."""
    draw = np.random.default_rng(seed)
    age, arm = draw.normal(50, 9, count), draw.choice(["a", "b", "c"], count)
    ill = np.where(age + 9 * (arm == "a") + draw.normal(0, 5, count) > 53, "yes", "no")
    ages = ["" if k % 17 == 5 else f"{value:.3f}" for k, value in enumerate(age)]
    sites = ["north" if k % 3 else "south" for k in range(count)]
    return {"site": sites, "age": ages, "arm": arm.tolist(), "ill": ill.tolist()}


def write_csv(path: Path, columns: dict[str, list[Any]]) -> Path:
    """Write a table of cells without commas."""
    rows = [list(columns), *zip(*columns.values(), strict=True)]
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows), encoding="utf-8")
    return path


def make_folders(where: Path) -> None:
    """Make one folder of each kind that a reader takes: the names are those of KINDS."""
    where.mkdir(parents=True, exist_ok=True)
    train = write_csv(where / "train.csv", draw_rows(90))
    write_csv(where / "rows.csv", draw_rows(30, 1))
    newcomer = draw_rows(24, 2)
    write_csv(where / "new.csv", {**newcomer, "site": ["new"] * 24})
    data = {"name": "table", "path": str(train), "client": "site", "target": "ill"}
    config: dict[str, Any] = {
        "rounds": 4, "threads": 1,
        "data": {**data, "holdout": {"validation": 0.2, "test": 0.3}},
        "model": {"name": "logistic", "l2": 0.01, "own": "bias"},
        "algorithm": {"name": "fedavg", "local": {"lr": 0.1, "steps": 2}},
    }  # fmt: skip
    (where / "run.toml").write_text(tomli_w.dumps(config), encoding="utf-8")
    ef.run(config, where / "whole", progress=False)
    ef.personalise(where / "whole").save(where / "whole")
    seconds, loop.CHECKPOINT_SECONDS = loop.CHECKPOINT_SECONDS, 0.0
    try:
        ef.run(config, where / "broken", callbacks=[_Dies()], progress=False)
    except KeyboardInterrupt:
        pass
    finally:
        loop.CHECKPOINT_SECONDS = seconds
    _run("export", where / "whole", "--out", where / "exported", "--torch", "--client", "north")
    _run("compare", where / "run.toml", "--out", where / "comparison", "--seeds", "1")
    _run("fit", train, "--client", "site", "--target", "ill", "--out", where / "fitted", "--quiet")
    federation = ef.Federation.from_table(str(train), client="site", target="ill")
    history = ef.train(ef.FedAvg(), ef.simulate(federation, "logistic"), rounds=2, progress=False)
    history.save(where / "python")
    (where / "whole" / "flower.json").write_text(json.dumps(FLOWER), encoding="utf-8")


FLOWER = {
    "run": "1", "plan": {"text": "{}", "signature": "", "by": ""}, "privacy": "none", "rounds": 4,
    "start": "", "deadlines": {}, "config": {"algorithm": {"name": "fedavg"}}, "model": {},
    "schema": {"input_shape": [6]}, "clients": [{"name": "north"}, {"name": "south"}],
}  # fmt: skip
KINDS = ("whole", "broken", "exported", "comparison", "fitted", "python")


def _run(*arguments: object) -> None:
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if result.exit_code:
        raise RuntimeError(f"{arguments}: {result.output} {result.exception!r}")


def renew(folder: Path) -> None:
    """Make all checksums of a folder true again, as far as its files can be read at all."""
    for manifest in sorted(folder.glob("checkpoint/*.json")):
        _reseal(manifest, tensors=_digest(manifest.with_suffix(".safetensors")))
    parts, model = (_digest(folder / f"{n}.safetensors") for n in ("personalised", "model"))
    _reseal(folder / "personalised.json", parts=parts, model=model)
    for path in (folder / "choice.json", *folder.glob("tried/*.json")):
        _reseal(path)
    _reseal(folder / RUN, **{CONFIG: _digest(folder / CONFIG)})
    if (folder / CHECKSUMS).is_file():
        sums = {name: _digest(folder / name) for name in (*FILES, SUMMARY)}
        (folder / CHECKSUMS).write_bytes(seal({k: v for k, v in sums.items() if v}))


def _digest(path: Path) -> str:
    readable = path.is_file() and path.stat().st_size < 2**30
    return digest(path.read_bytes()) if readable else ""


def _reseal(path: Path, **changes: str) -> None:
    try:
        told = json.loads(path.read_bytes())
        told.pop(SEAL)
        path.write_bytes(seal({**told, **{k: v for k, v in changes.items() if k in told}}))
    except (OSError, ValueError, AttributeError, KeyError, TypeError, RecursionError):
        pass  # not there, or no document that a seal could be put on


# -- what is done to them -----------------------------------------------------------------------

Change = Callable[[Path, Path], object]
"""Given a folder and a place outside of it with a secret; false: there is nothing to change."""


def edit_json(name: str, change: Callable[[Any], Any]) -> Change:
    """Change a JSON document; the change may return another, or alter it in place."""

    def act(gift: Path, outside: Path) -> bool:
        if not (gift / name).is_file():
            return False
        told = json.loads((gift / name).read_bytes())
        found = change(told)
        (gift / name).write_text(json.dumps(told if found is None else found), encoding="utf-8")
        return True

    return act


def edit_toml(change: Callable[[dict[str, Any]], object]) -> Change:
    """Change the configuration in place."""

    def act(gift: Path, outside: Path) -> bool:
        if not (gift / CONFIG).is_file():
            return False
        table = tomllib.loads((gift / CONFIG).read_text(encoding="utf-8"))
        change(table)
        (gift / CONFIG).write_text(tomli_w.dumps(table), encoding="utf-8")
        return True

    return act


def edit_text(name: str, old: str, new: str, count: int = -1) -> Change:
    """Replace text in a file; the new one may be bytes that are no text (as latin-1)."""

    def act(gift: Path, outside: Path) -> bool:
        if not (gift / name).is_file():
            return False
        content = (gift / name).read_bytes().decode("latin-1")
        changed = content.replace(old, new, count) if old else content + new
        (gift / name).write_bytes(changed.encode("latin-1"))
        return changed != content

    return act


def edit_tensors(name: str, change: Callable[[dict[str, torch.Tensor]], dict[str, Any]]) -> Change:
    """Replace the tensors of a file."""

    def act(gift: Path, outside: Path) -> bool:
        if not (gift / name).is_file():
            return False
        (gift / name).write_bytes(save(change(load((gift / name).read_bytes()))))
        return True

    return act


def rename_client(new: str) -> Change:
    """Let the first client have another name, in whatever names it."""

    def act(gift: Path, outside: Path) -> bool:
        told_in = ("clients", "metrics", "weights", "alone", "without_own", "average", "events",
                   "predictor", "details", "split")  # fmt: skip
        for name in (p.name for p in gift.iterdir() if p.stem in told_in):
            if (gift / name).is_file():
                text = (gift / name).read_text(encoding="utf-8")
                told = json.dumps(new)[1:-1]
                if not name.startswith(("clients", "events", "pred", "det")):
                    told = '"' + new.replace('"', '""') + '"'
                (gift / name).write_text(text.replace("north", told), encoding="utf-8")
        return (gift / "clients.json").is_file() or (gift / "predictor.json").is_file()

    return act


def link(name: str, target: str = "secret") -> Change:
    """Put a symbolic link in the place of a file or folder."""

    def act(gift: Path, outside: Path) -> bool:
        path = gift / name
        if not path.parent.is_dir() or (target == "secret" and path.is_dir()):
            return False
        if path.is_dir():
            shutil.move(path, outside / path.name)
        else:
            path.unlink(missing_ok=True)
        path.symlink_to(outside / (path.name if target == "moved" else target))
        return True

    return act


def code(change: Callable[[dict[str, Any], str], object]) -> Change:
    """Let the configuration name code beside it, which writes ``ran`` when it is loaded."""

    def act(gift: Path, outside: Path) -> bool:
        plant(gift, outside)
        return bool(edit_toml(lambda table: change(table, "evilmod.py:make"))(gift, outside))

    return act


def plant(folder: Path, outside: Path) -> None:
    """Write a module that says when it is loaded."""
    (folder / "evilmod.py").write_text(
        f"import pathlib\npathlib.Path({str(outside / 'ran')!r}).write_text('ran')\n"
        "def make(*a, **k): raise RuntimeError('made')\n"
    )


def pipe(gift: Path, outside: Path) -> bool:
    """Put a pipe into the place of a table; whoever opens it waits."""
    (gift / "events.jsonl").unlink(missing_ok=True)
    os.mkfifo(gift / "events.jsonl")
    return True


def grow(name: str) -> Change:
    """Let a file have a quarter of a terabyte of holes."""

    def act(gift: Path, outside: Path) -> bool:
        if (gift / name).is_file():
            os.truncate(gift / name, 2**38)
            return True
        return False

    return act


def folder_for_file(name: str) -> Change:
    """Put a folder in the place of a file."""

    def act(gift: Path, outside: Path) -> bool:
        (gift / name).unlink(missing_ok=True)
        (gift / name).mkdir()
        return True

    return act


def bomb(gift: Path, outside: Path) -> bool:
    """Write arrays of zeros, deflated a thousandfold."""
    with zipfile.ZipFile(gift / "hits.npz", "w", zipfile.ZIP_DEFLATED) as pack:
        for part in ("correct", "checksums"):
            out = io.BytesIO()
            np.save(out, np.zeros(2**26, np.uint8))
            pack.writestr(f"test/{part}.npy", out.getvalue())
        out = io.BytesIO()
        np.save(out, np.array(2**28))
        pack.writestr("test/total.npy", out.getvalue())
    return True


def pickled(gift: Path, outside: Path) -> bool:
    """Write an array of objects, which would have to be unpickled."""
    np.savez(gift / "hits.npz", **{
        "test/correct": np.array([_Runs(outside / "ran")], dtype=object),
        "test/total": np.array(1), "test/checksums": np.zeros(1),
    })  # type: ignore[arg-type]  # fmt: skip
    return True


class _Runs:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "ran")


def pickled_model(gift: Path, outside: Path) -> bool:
    """Put what ``torch.load`` would unpickle in the place of the weights."""
    torch.save({"weight": _Runs(outside / "ran")}, gift / "model.safetensors")
    return True


def strange_class(address: str) -> Change:
    """Let checkpoints name another class, or a module that nobody imported."""
    import re

    def act(gift: Path, outside: Path) -> bool:
        found = list(gift.glob("checkpoint/*.json"))
        for path in found:
            text = path.read_text(encoding="utf-8")
            path.write_text(re.sub(r'"class": "[^"]*"', f'"class": "{address}"', text))
        return bool(found)

    return act


def many_files(gift: Path, outside: Path) -> bool:
    """Add thousands of small files and folders."""
    for k in range(3000):
        (gift / f"extra-{k}").mkdir() if k % 2 else (gift / f"extra-{k}").touch()
    return True


def odd_names(gift: Path, outside: Path) -> bool:
    """Add files whose names are no text, or write to a terminal."""
    (gift / "\x1b]0;owned\x07\n\x1b[2J").touch()
    Path(os.fsdecode(os.fsencode(gift) + b"/\xff\xfe")).touch()
    return True


def _header(gift: Path, outside: Path) -> bool:
    if (gift / "model.safetensors").is_file():
        (gift / "model.safetensors").write_bytes((2**60).to_bytes(8, "little") + b"{}")
        return True
    return False


def _deep(key: str, depth: int = 3000) -> str:
    return f'{{"{key}":' * depth + "1" + "}" * depth


def _replace(name: str, text: str) -> Change:
    def act(gift: Path, outside: Path) -> bool:
        there = (gift / name).is_file()
        (gift / name).write_bytes(text.encode("latin-1"))
        return there

    return act


HUGE = "9" * 5000
ESCAPES = "\x1b[31m\x1b]0;owned\x07"
HTML = "</script><script>document.title='owned'</script><img src=x onerror=alert(1)>"
SAMPLES: Callable[[Any], Any] = lambda told: told["samples"]  # noqa: E731

GIFTS: dict[str, Change] = {
    # code, wherever a configuration could name it
    "code: model": code(lambda t, a: t["model"].update(name=a)),
    "code: data": code(lambda t, a: t["data"].update(name=a)),
    "code: partition": code(lambda t, a: t.update(data={"name": "mnist", "partition": a})),
    "code: loss": code(lambda t, a: t["model"].update(loss=a)),
    "code: algorithm": code(lambda t, a: t.update(algorithm={"name": a})),
    "code: objective": code(
        lambda t, a: t.update(algorithm={"name": "scaff-pd", "objective": {"name": a}})
    ),
    "code: metric": code(lambda t, a: t.update(evaluate={"metrics": [a]})),
    "code: engine": code(lambda t, a: t.update(engine={"name": a})),
    "code: own part": code(lambda t, a: t["model"].update(own=[a])),
    "code: a module of the machine": code(
        lambda t, a: t["model"].update(name="subprocess:Popen", args=["touch"])
    ),
    "code: in run.json": edit_json(RUN, lambda t: t.update(model_name="evilmod:make")),
    "code: federation": edit_json(
        "flower.json", lambda t: t.update(config={"algorithm": "evilmod.py:make"})
    ),
    "code: a class of a checkpoint": strange_class("antigravity:Thing"),
    "code: our own module in a checkpoint": strange_class("equifed.flower.trial.apps:x"),
    "code: another class in a checkpoint": strange_class("equifed.runs.run:RunFolder"),
    # links, and names that lead elsewhere
    **{f"link: {name}": link(name) for name in (
        "config.toml", "run.json", "flower.json", "events.jsonl", "metrics.csv", "clients.json",
        "model.safetensors", "predictor.json", "comparison.json", "report.html", "report.json",
        "signature.json", "personalised.json", "personalised.safetensors", "MODEL_CARD.md",
        "choice.json", ".lock", "notes",
    )},
    **{f"link: {name}": link(name, "moved") for name in ("checkpoint", "tried", "run-0")},
    "link: export": link("export", "."),
    "path: a comparison's run": edit_json(
        "comparison.json", lambda t: t["methods"][0]["runs"][0].update(folder="../elsewhere")
    ),
    "path: a checksum": edit_json(CHECKSUMS, lambda t: t.update({"../secret": digest(b"")})),
    # what is no file, or too much of one
    "pipe": pipe, "many files": many_files, "odd names": odd_names,
    **{f"size: {name}": grow(name) for name in (CONFIG, "model.safetensors", "metrics.csv")},
    **{f"folder: {name}": folder_for_file(name) for name in (
        "config.toml", "run.json", "events.jsonl", "model.safetensors", "summary.json", "hits.npz"
    )},
    "deflated arrays": bomb, "pickled arrays": pickled, "pickled model": pickled_model,
    "header of 2^60 bytes": _header,
    # documents that are none, or of other types
    **{f"empty: {name}": _replace(name, "") for name in (
        "run.json", "config.toml", "clients.json", "rounds.csv", "summary.json", "predictor.json"
    )},
    **{f"a list: {name}": _replace(name, "[]") for name in ("run.json", "flower.json", SUMMARY)},
    **{f"deep: {name}": _replace(name, _deep("a")) for name in ("run.json", "events.jsonl")},
    "deep: config.toml": _replace(CONFIG, "a = " + "[" * 3000 + "]" * 3000),
    "no text: metrics.csv": edit_text("metrics.csv", "test", "te\xff\xfet", 1),
    "zeros: metrics.csv": edit_text("metrics.csv", "accuracy", "accu\x00racy"),
    "huge number: rounds.csv": edit_text("rounds.csv", "\n2,", f"\n{HUGE},"),
    "negative round: metrics.csv": edit_text("metrics.csv", "\n2,", "\n-7,"),
    "no number: metrics.csv": edit_text("metrics.csv", "test,accuracy,0", "test,accuracy,nan0"),
    "infinite: metrics.csv": edit_text("metrics.csv", "test,loss,0", "test,loss,1e999"),
    "huge count: metrics.csv": edit_text("metrics.csv", "\n0,north,test,loss,",
                                         f"\n0,north,test,huge,1,{2**62}\n0,north,test,loss,"),
    "million columns: weights.csv": edit_text("weights.csv", "", "1," * 10**6 + "\n"),
    "no such client: weights.csv": edit_text("weights.csv", "north", "nobody"),
    "formula: metric": edit_text("metrics.csv", "accuracy", "=cmd|' /C calc'!A0"),
    "HTML: metric": edit_text("metrics.csv", "accuracy", HTML),
    "HTML: reasons": edit_text("events.jsonl", '"reason": "', f'"reason": "{HTML}'),
    "HTML: given out": edit_text("events.jsonl", '"kind": "', f'"kind": "{HTML}'),
    "HTML: engine": edit_json(RUN, lambda t: t["data"].update(name=HTML, source={HTML: HTML})),
    "escapes: event": edit_json("flower.json", lambda t: t.update(run=ESCAPES)),
    "events of other types": edit_text(
        "events.jsonl", "", '{"event": ["x"], "round": true, "client": null, "reason": {"a": 1}}\n'
    ),
    "event of a stranger": edit_text(
        "events.jsonl", "", '{"event": "quarantine", "round": 1, "client": "nobody"}\n'
    ),
    # the description of the run and of its model
    "no samples": edit_json(RUN, lambda t: t.pop("samples") and None),
    "samples: nothing in them": edit_json(RUN, lambda t: t.update(samples={})),
    "samples: huge": edit_json(RUN, lambda t: SAMPLES(t).update(input_shape=[10**13])),
    "samples: negative": edit_json(RUN, lambda t: SAMPLES(t).update(input_shape=[-6])),
    "samples: texts": edit_json(RUN, lambda t: SAMPLES(t).update(input_shape="six", classes="x")),
    "samples: a million classes": edit_json(
        RUN, lambda t: SAMPLES(t).update(classes=10**6, class_names=[])
    ),
    "samples: fewer names": edit_json(RUN, lambda t: SAMPLES(t).update(class_names=["no"])),
    "samples: names of escapes": edit_json(
        RUN, lambda t: SAMPLES(t).update(class_names=[ESCAPES, "=1+1"])
    ),
    "samples: layout": edit_json(RUN, lambda t: SAMPLES(t).update(layout={"fields": [{}]})),
    "data: a text": edit_json(RUN, lambda t: t.update(data="none")),
    "versions: HTML": edit_json(RUN, lambda t: t.update(versions={"equifed": HTML}, ran=HTML)),
    "format of tomorrow": edit_json(RUN, lambda t: t.update(format=99)),
    "format: a text": edit_json(RUN, lambda t: t.update(format="two")),
    "summary: other types": edit_json(SUMMARY, lambda t: {k: [] for k in t}),
    "config: other types": edit_toml(lambda t: t.update(rounds="many", data=3, model=["x"])),
    "config: unknown names": edit_toml(lambda t: t["model"].update(name="nobody")),
    "config: huge network": edit_toml(lambda t: t["model"].update(name="mlp", hidden=[10**7] * 3)),
    "config: huge numbers": edit_toml(lambda t: t.update(rounds=10**18, threads=10**9)),
    "config: dtype of torch": edit_toml(lambda t: t["model"].update(dtype="load")),
    "config: penalty": edit_toml(lambda t: t["model"].update(own_l2="3/m")),
    "preparation: other types": edit_json(
        "preparation.json", lambda t: dict.fromkeys(t)
    ),
    "preparation: a column more": edit_json(
        "preparation.json", lambda t: t.setdefault("columns", []).append({"kind": "x"})
    ),
    # weights
    "weights: other names": edit_tensors(
        "model.safetensors", lambda t: {f"x{k}": v for k, v in enumerate(t.values())}
    ),
    "weights: other shapes": edit_tensors(
        "model.safetensors", lambda t: {k: v.reshape(-1)[:1].clone() for k, v in t.items()}
    ),
    "weights: whole numbers": edit_tensors(
        "model.safetensors", lambda t: {k: v.long() for k, v in t.items()}
    ),
    "weights: NaN": edit_tensors(
        "model.safetensors", lambda t: {k: v * float("nan") for k, v in t.items()}
    ),
    "weights: none": edit_tensors("model.safetensors", lambda t: {}),
    "own parts: of fewer clients": edit_tensors(
        "own.safetensors", lambda t: {k: v[:1].clone() for k, v in t.items()}
    ),
    "own parts: other names": edit_tensors(
        "own.safetensors", lambda t: {f"x.{k}": v for k, v in t.items()}
    ),
    "personalised: other shapes": edit_tensors(
        "personalised.safetensors", lambda t: {k: v[:1, :1].clone() for k, v in t.items()}
    ),
    # names of clients
    "client: HTML": rename_client(HTML),
    "client: escapes": rename_client(ESCAPES),
    "client: formula": rename_client("=HYPERLINK(1)"),
    "client: a path": rename_client("../../ran"),
    "client: turned round": rename_client("\u202egpj.exe"),
    "client: a long one": rename_client("n" * 10**6),
    "client: lines": rename_client("a\nb\r\nc"),
    "client: the other's twin": rename_client("sou\u200bth"),
    "client: twice": edit_json("clients.json", lambda t: ["south", "south"]),
    "clients: none": edit_json("clients.json", lambda t: []),
    "clients: numbers": edit_json("clients.json", lambda t: [1, 2]),
    # what fit, compare and exports keep
    "comparison: other types": edit_json("comparison.json", lambda t: t.update(methods=[{}])),
    "comparison: deep": _replace("comparison.json", _deep("methods")),
    "choice: a list": _replace("choice.json", "[]"),
    "tried: other types": lambda gift, outside: [
        path.write_text(json.dumps(dict.fromkeys(json.loads(path.read_bytes()), "x")))
        for path in gift.glob("tried/*.json")
    ],
    "predictor: other types": edit_json("predictor.json", lambda t: dict.fromkeys(t, 7)),
    "predictor: nothing": edit_json("predictor.json", lambda t: {}),
}  # fmt: skip


# -- changes at random ---------------------------------------------------------------------------

NASTY: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**400, 1e308, -0.5, "", "x", HTML, ESCAPES, "../../secret", [],
    [None], ["a", 1], {}, {"a": 1}, "evilmod.py:make", [[]], "é" * 300, "1e400",
)  # fmt: skip


def places(told: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a document with every key of it."""
    keys = list(told) if isinstance(told, dict) else range(len(told))
    for key in keys if isinstance(told, dict | list) else ():
        yield told, key
        if isinstance(told[key], dict | list):
            yield from places(told[key])


def change_at_random(gift: Path, outside: Path, draw: np.random.Generator) -> str:
    """Change one value, line or cell of one file; return what was done."""
    plant(gift, outside)
    ends = (".json", ".toml", ".csv", ".jsonl")
    files = sorted(p for p in gift.rglob("*") if p.suffix in ends and p.is_file())
    path = files[int(draw.integers(len(files)))]
    told_of = f"{path.relative_to(gift)}"
    nasty = NASTY[int(draw.integers(len(NASTY)))]
    if path.suffix in (".json", ".toml"):
        text = path.read_text(encoding="utf-8")
        told = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        found = list(places(told))
        if not found:
            return f"{told_of}: empty"
        where, key = found[int(draw.integers(len(found)))]
        if draw.random() < 0.2:
            del where[key]
        else:
            where[key] = nasty
        what = f"{told_of}: {key!r} = {str(nasty)[:40]!r}"
        try:
            new = json.dumps(told) if path.suffix == ".json" else tomli_w.dumps(told)
        except TypeError:  # TOML has no null
            return f"{told_of}: unchanged"
        path.write_text(new, encoding="utf-8")
        return what
    lines = path.read_text(encoding="utf-8").split("\n")
    at = int(draw.integers(len(lines)))
    cells = lines[at].split(",")
    cells[int(draw.integers(len(cells)))] = str(nasty).replace("\n", " ")
    lines[at] = ",".join(cells)
    path.write_text("\n".join(lines), encoding="utf-8")
    return f"{told_of}: line {at + 1} {str(nasty)[:40]!r}"

"""The embedded data sets are the publishers' data, prepared without looking at what is held out."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from equifed.data import DataError, Federation, read_columns
from equifed.data.mapped import standardise
from equifed.datasets import DATASETS, load
from equifed.datasets.files import read_idx
from equifed.datasets.small import EMBEDDED, HEART_CONTINUOUS, HEART_GAPS, HEART_NUMBERS

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "make_embedded_data.py"


def test_embedded_files_are_small():
    assert sum(path.stat().st_size for path in EMBEDDED.iterdir()) < 3_000_000


def test_embedded_data_sets_load_without_any_folder(own_folder):
    for entry in DATASETS.values():
        if entry.embedded:
            fed = load(entry.name)
            assert fed.source["publisher"] and len(fed) >= 3


def test_copies_are_the_originals(data_folder):
    for name in ("cleveland", "hungarian", "switzerland", "va"):
        file = f"processed.{name}.data"
        original = data_folder / "heart_disease" / file
        assert (EMBEDDED / file).read_bytes() == original.read_bytes()
    original = data_folder / "penguins" / "penguins.csv"
    assert (EMBEDDED / "penguins.csv").read_bytes() == original.read_bytes()


def test_the_script_writes_what_is_embedded(data_folder):
    spec = importlib.util.spec_from_file_location("make_embedded_data", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    made = script.fashion_three()
    with np.load(EMBEDDED / "fashion_three.npz") as stored:
        assert set(stored) == set(made)
        for name in made:
            np.testing.assert_array_equal(stored[name], made[name])


def test_fashion_three_is_the_first_images_of_three_classes(data_folder):
    images = read_idx(data_folder / "fashion_mnist" / "t10k-images-idx3-ubyte.gz")
    labels = read_idx(data_folder / "fashion_mnist" / "t10k-labels-idx1-ubyte.gz")
    fed = load("fashion-three")
    assert fed.names == ("T-shirt", "pullover", "shirt")
    assert fed.train.sizes.tolist() == [1000] * 3 and fed.test.sizes.tolist() == [500] * 3
    for i, label in enumerate((0, 2, 6)):
        expected = images[labels == label][:500] / 255
        np.testing.assert_allclose(fed.test.client(i)[0][:, 0], expected, atol=1e-7)
        assert set(fed.test.client(i)[1]) == {i}


def test_fashion_three_pixels_are_in_the_unit_interval():
    fed = load("fashion-three", train=200, test=20)
    assert fed.train.inputs.dtype == np.float32 and fed.input_shape == (1, 28, 28)
    assert fed.train.inputs.min() == 0 and fed.train.inputs.max() == 1
    assert len(fed.train) == 600 and len(fed.test) == 60
    with pytest.raises(DataError, match=r"train must lie in 1\.\.1000, got 1001"):
        load("fashion-three", train=1001)


# -- heart disease --------------------------------------------------------------------------------


def sizes(fed):
    return sum(split.sizes for split in fed.splits().values()).tolist()


def test_heart_disease_keeps_every_patient_or_the_complete_ones():
    assert sizes(load("heart-disease")) == [303, 294, 123, 200]
    assert sizes(load("heart-disease", missing="complete")) == [303, 261, 46, 130]


def test_heart_disease_labels_are_those_of_the_files():
    fed = load("heart-disease", test=0)
    for i, name in enumerate(("cleveland", "hungarian", "switzerland", "va")):
        lines = (EMBEDDED / f"processed.{name}.data").read_text().split()
        ill = sum(int(line.rsplit(",", 1)[1]) > 0 for line in lines)
        assert int(fed.train.client(i)[1].sum()) == ill


def test_heart_disease_is_standardised_on_training_patients_alone():
    fed = load("heart-disease", seed=3)
    columns = [HEART_NUMBERS.index(name) for name in HEART_CONTINUOUS]
    train, test = fed.train.inputs[:, columns], fed.test.inputs[:, columns]
    np.testing.assert_allclose(train.mean(0), 0, atol=1e-5)
    np.testing.assert_allclose(train.std(0), 1, atol=1e-5)
    assert np.abs(test.mean(0)).max() > 1e-3  # it would be smaller had test patients been used


def test_heart_disease_marks_and_fills_what_is_missing():
    fed = load("heart-disease", test=0)
    gaps = fed.train.inputs[:, -len(HEART_GAPS) :]
    chol = HEART_GAPS.index("chol")
    swiss = fed.names.index("Switzerland")
    assert fed.train.client(swiss)[0][:, gaps.shape[1] * -1 + chol].all()  # recorded as 0
    raw = sum(
        line.split(",")[4] in ("?", "0")
        for name in ("cleveland", "hungarian", "switzerland", "va")
        for line in (EMBEDDED / f"processed.{name}.data").read_text().split()
    )
    assert gaps[:, chol].sum() == raw
    column = fed.train.inputs[:, HEART_NUMBERS.index("chol")]
    assert len(set(column[gaps[:, chol] > 0])) == 1  # all take the same median
    present = column[gaps[:, chol] == 0]
    assert column[gaps[:, chol] > 0][0] == pytest.approx(np.median(present), abs=1e-6)


def test_the_embedded_files_are_the_publishers(data_folder):
    for path in EMBEDDED.glob("processed.*.data"):
        assert path.read_bytes() == (data_folder / "heart_disease" / path.name).read_bytes()
    raw = read_columns(data_folder / "penguins" / "penguins-raw.csv")
    held = read_columns(EMBEDDED / "penguins.csv")
    assert raw["Culmen Length (mm)"] == held["bill_length_mm"]
    assert raw["Body Mass (g)"] == held["body_mass_g"] and raw["Island"] == held["island"]
    assert [v and v.lower() for v in raw["Sex"]] == held["sex"]


def test_complete_patients_have_no_indicator_columns():
    wide, narrow = load("heart-disease"), load("heart-disease", missing="complete")
    assert wide.input_shape[0] - narrow.input_shape[0] == len(HEART_GAPS)
    with pytest.raises(DataError, match="'impute' or 'complete', got 'guess'"):
        load("heart-disease", missing="guess")


# -- penguins -------------------------------------------------------------------------------------


def test_penguins_without_gaps_by_species_and_by_island():
    by_species = load("penguins")
    assert by_species.names == ("Adelie", "Gentoo", "Chinstrap")
    assert sizes(by_species) == [146, 119, 68]
    by_island = load("penguins", clients="island", target="species")
    assert sum(sizes(by_island)) == 333 and by_island.classes == 3
    assert by_island.train.class_counts(3)[0].tolist()[1:] == [0, 0]  # Torgersen: Adelie only


def test_wrong_columns_of_penguins_are_refused():
    with pytest.raises(DataError, match="clients must be one of species"):
        load("penguins", clients="colour")


# -- shared ---------------------------------------------------------------------------------------


def test_standardising_a_constant_column_only_shifts_it():
    x = np.array([[5.0, 1.0], [5.0, 3.0]])
    fed = standardise(Federation.from_clients({"a": (x, [0, 1])}))
    np.testing.assert_array_equal(fed.train.inputs, [[0, -1], [0, 1]])


def test_unknown_names_and_parameters_are_refused():
    with pytest.raises(DataError, match="no data set 'fashion'; there are fashion-three"):
        load("fashion")
    with pytest.raises(DataError, match="no parameter 'sed'; it has missing"):
        load("heart-disease", sed=1)


def test_every_entry_is_described():
    for entry in DATASETS.values():
        assert entry.description and entry.licence and "\n" not in entry.description
        assert entry.loader.__doc__

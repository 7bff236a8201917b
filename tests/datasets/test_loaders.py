"""Loaders of the data files: counts the publishers state, and the same data from every format."""

import gzip
import hashlib
import json

import numpy as np
import pytest
from tests.datasets.idx import idx

from equifed.data import DataError, Federation
from equifed.datasets import load
from equifed.datasets.files import read_idx
from equifed.datasets.natural import CHARACTERS, read_adult, read_moby, tokenise
from equifed.datasets.pooled import divide

pytestmark = pytest.mark.long


def test_mnist_is_complete_and_divided_once(data_folder):
    fed = load("mnist", partition={"name": "dirichlet", "clients": 8, "alpha": 0.5}, seed=1)
    assert len(fed.train) == 60_000 and len(fed.test) == 10_000 and fed.input_shape == (1, 28, 28)
    labels = read_idx(data_folder / "mnist" / "train-labels-idx1-ubyte.gz")
    assert fed.train.class_counts(10).sum(0).tolist() == np.bincount(labels).tolist()
    assert "Dirichlet(clients=8" in fed.source["partition"]
    assert fed.source["sha256 of t10k-labels-idx1-ubyte.gz"].startswith("f7ae60f92e00ec6d")


def test_fashion_mnist_one_class_per_client_and_the_embedded_three(data_folder):
    fed, three = load("fashion-mnist", partition="one-class"), load("fashion-three")
    np.testing.assert_array_equal(fed.train.class_counts(10), 6000 * np.eye(10))
    np.testing.assert_array_equal(fed.test.class_counts(10), 1000 * np.eye(10))
    for i, label in enumerate((0, 2, 6)):
        np.testing.assert_array_equal(three.train.client(i)[0], fed.train.client(label)[0][:1000])


def write_digits(folder, gz):
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name, count in (("train", 60), ("t10k", 20)):
        images = draw.integers(256, size=(count, 28, 28), dtype=np.uint8)
        labels = (np.arange(count) % 10).astype(np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            content = gzip.compress(idx(array)) if gz else idx(array)
            (folder / f"{name}-{kind}-ubyte{'.gz' * gz}").write_bytes(content)


def test_unpacked_idx_files_are_read_too(own_folder, monkeypatch, tmp_path):
    write_digits(own_folder / "mnist", gz=False)
    plain = load("mnist", partition={"name": "iid", "clients": 2})
    monkeypatch.setenv("EQUIFED_DATA", str(tmp_path / "packed"))
    write_digits(tmp_path / "packed" / "mnist", gz=True)
    assert load("mnist", partition={"name": "iid", "clients": 2}).checksum() == plain.checksum()


def test_fewer_samples_may_be_asked_for(own_folder):
    write_digits(own_folder / "mnist", gz=True)
    fed = load("mnist", partition={"name": "iid", "clients": 2}, samples=30)
    assert len(fed.train) == 30 and len(fed.test) == 5
    with pytest.raises(DataError, match="samples must be at least 1"):
        load("mnist", samples=0)


def test_images_without_their_labels_are_refused(own_folder):
    write_digits(own_folder / "mnist", gz=True)
    short = idx(np.zeros(3, dtype=np.uint8))
    (own_folder / "mnist" / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(short))
    with pytest.raises(DataError, match="images and labels differ"):
        load("mnist")


@pytest.mark.slow
def test_cifar10_pixels_are_the_original_ones(data_folder):
    from equifed.datasets.files import read_cifar_mosaics

    pools = read_cifar_mosaics(data_folder / "cifar10")
    assert hashlib.sha256(np.ascontiguousarray(pools["train"][0])).hexdigest() == (
        "9d5c2eddadb0deff02c14c350c0385aab7b1d5ff1edfeb4997c8dc8644960111"
    )
    assert hashlib.sha256(np.ascontiguousarray(pools["test"][0])).hexdigest() == (
        "177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56"
    )
    fed = load("cifar10", partition={"name": "iid", "clients": 3}, standardised=True)
    assert fed.train.class_counts(10).sum(0).tolist() == [5000] * 10
    np.testing.assert_allclose(fed.train.inputs.mean((0, 2, 3), dtype=float), 0, atol=1e-4)
    np.testing.assert_allclose(fed.train.inputs.std((0, 2, 3), dtype=float), 1, atol=1e-4)


@pytest.mark.slow
def test_cifar100_pixels_are_the_original_ones(data_folder):
    from equifed.datasets.files import read_cifar_mosaics

    names = [*(f"train_{k}" for k in range(1, 6)), "test"]
    pools = read_cifar_mosaics(data_folder / "cifar100", names, "_fine")
    assert [hashlib.sha256(pools[k][0].tobytes()).hexdigest()[:16] for k in ("train", "test")] == [
        "de64658905c6b161", "83c56492b2c11211"
    ]  # fmt: skip
    fed = load("cifar100", partition={"name": "iid", "clients": 3}, samples=600)
    assert fed.class_names[:3] == ("apple", "aquarium_fish", "baby") and fed.classes == 100
    np.testing.assert_array_equal(np.bincount(pools["train"][1]), 500)


def test_cifar100_says_which_file_it_needs(own_folder):
    with pytest.raises(DataError, match=r"no cifar100/test\.webp in the folder EQUIFED_DATA"):
        load("cifar100")


def test_thinned_clients_keep_the_test_samples_of_the_whole_division():
    labels = np.random.default_rng(0).integers(4, size=2000)
    pool = (np.ones((2000, 1), dtype=np.float32), labels)
    spec = {"name": "dirichlet", "clients": 10, "alpha": 0.3}
    whole, thin = (
        divide("x", pool, pool, partition, 0, tuple("abcd"), {})
        for partition in (spec, {"name": "imbalance", "base": spec})
    )
    assert len(thin.train) < len(whole.train)
    np.testing.assert_array_equal(thin.test.sizes, whole.test.sizes)


# -- adult ----------------------------------------------------------------------------------------


def test_adult_has_the_published_counts(data_folder):
    fed = load("adult")
    held = dict(zip(fed.names, zip(fed.train.sizes, fed.test.sizes, strict=True), strict=True))
    assert held["doctorate"] == (413, 181)
    assert len(fed.train) == 32_561 and len(fed.test) == 16_281
    assert int(fed.train.targets.sum()) == 7841  # 24.08 % earn more, as adult.names says
    np.testing.assert_allclose(fed.train.inputs[:, :6].mean(0), 0, atol=1e-3)


def test_adult_rows_keep_their_missing_values(data_folder):
    table = read_adult(data_folder / "adult" / "adult.data")
    assert sum("?" in row for row in zip(*table.values(), strict=True)) == 2399


def test_adult_clients_by_column(data_folder):
    assert set(load("adult", clients="sex").names) == {"Male", "Female"}
    with pytest.raises(DataError, match="doctorate or one of workclass"):
        load("adult", clients="age")


def test_another_table_is_not_adult(own_folder):
    (own_folder / "adult").mkdir()
    for name in ("adult.data", "adult.test"):
        (own_folder / "adult" / name).write_text("1, 2, 3\n")
    with pytest.raises(DataError, match="expected 15 fields"):
        load("adult")


# -- natural clients ------------------------------------------------------------------------------


def test_vehicle_has_the_published_counts(data_folder):
    fed = load("vehicle", test=0)
    assert len(fed) == 23 and len(fed.train) == 1860 and fed.input_shape == (100,)
    assert np.bincount(fed.train.targets).tolist() == [837, 1023]
    assert fed.train.sizes.min() == 7 and fed.train.sizes.max() == 534
    held = load("vehicle", test=0.2)
    assert held.test.sizes.min() >= 1


def test_vehicle_in_the_format_of_ditto(data_folder, own_folder, monkeypatch):
    raw = gzip.decompress((data_folder / "vehicle" / "vehicle_ditto_train.json.gz").read_bytes())
    (own_folder / "vehicle").mkdir()
    (own_folder / "vehicle" / "mytrain.json").write_bytes(raw)
    ditto = load("vehicle")
    monkeypatch.setenv("EQUIFED_DATA", str(data_folder))
    assert ditto.checksum() == load("vehicle").checksum()


def test_femnist_has_the_published_counts(data_folder):
    fed = load("femnist")
    assert len(fed) == 105 and len(fed.train) == 14_640 and len(fed.test) == 1677
    assert (fed.train.sizes.min(), fed.train.sizes.max()) == (7, 164)
    assert (fed.test.sizes.min(), fed.test.sizes.max()) == (1, 19)
    with np.load(data_folder / "femnist" / "femnist_leaf_subset.npz") as stored:
        mine = stored["writer_train"] == 40
        np.testing.assert_array_equal(fed.train.client(40)[1], stored["y_train"][mine])
        np.testing.assert_allclose(
            fed.train.client(40)[0][:, 0], stored["x_train"][mine] / 255, atol=1e-7
        )


def test_some_writers_are_writers_of_all(data_folder):
    some, others = (load("femnist", writers=9, seed=s) for s in (0, 1))
    everyone = load("femnist")
    assert len(some) == 9 and some.names != others.names
    assert some.checksum() == everyone.subset(some.names).checksum()
    with pytest.raises(DataError, match=r"1\.\.105, got 106"):
        load("femnist", writers=106)


def leaf(folder, name, users):
    (folder / name).mkdir(parents=True)
    content = {"users": list(users), "user_data": users}
    (folder / name / "all.json").write_text(json.dumps(content))


def test_femnist_in_the_format_of_leaf(own_folder):
    one = {"x": [[0.25] * 784, [1.0] * 784], "y": [61, 0]}
    leaf(own_folder / "femnist", "train", {"w1": one, "w2": one})
    leaf(own_folder / "femnist", "test", {"w2": {"x": [[0.5] * 784], "y": [7]}})
    fed = load("femnist")
    assert fed.names == ("w1", "w2") and fed.test.sizes.tolist() == [0, 1]
    assert fed.train.client(0)[1].tolist() == [61, 0] and fed.train.inputs[0].max() == 0.25


@pytest.mark.parametrize("name", ["femnist", "shakespeare"])
def test_what_cannot_be_fetched_says_where_to_put_it(own_folder, name):
    with pytest.raises(DataError, match=rf"into \$EQUIFED_DATA/{name}"):
        load(name)


# -- Shakespeare ----------------------------------------------------------------------------------


def test_the_moby_edition_gives_speeches_without_directions(data_folder):
    roles = read_moby(data_folder / "shakespeare" / "moby_shakespeare.tar.gz")
    assert len({name.split("_")[0] for name in roles}) == 37
    assert roles["hamlet_HAMLET"][0] == "A little more than kin, and less than kind."
    assert not any("[" in line or "]" in line for said in roles.values() for line in said)


@pytest.mark.parametrize("stride", [7, 80])
def test_samples_are_windows_of_a_roles_text(data_folder, stride):
    fed = load("shakespeare", roles=5, stride=stride, seed=2)
    texts = read_moby(data_folder / "shakespeare" / "moby_shakespeare.tar.gz")
    assert fed.input_shape == (80,) and fed.train.inputs.dtype == np.int64 and fed.classes == 80
    for i, name in enumerate(fed.names):
        text = tokenise(" ".join(texts[name]))
        cut = len(text) - int(0.2 * len(text))
        x, y = fed.train.client(i)
        assert len(y) == len(range(0, cut - 80, stride))
        for row, start in enumerate(range(0, cut - 80, stride)):
            np.testing.assert_array_equal(x[row], text[start : start + 80])
            assert y[row] == text[start + 80]
        if fed.test.sizes[i]:
            np.testing.assert_array_equal(fed.test.client(i)[0][0], text[cut : cut + 80])


def test_tokens_are_reversible_for_known_characters():
    assert "".join(CHARACTERS[t] for t in tokenise(CHARACTERS)) == CHARACTERS
    assert len(CHARACTERS) == len(set(CHARACTERS)) == 80


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stride": 0}, "stride and min_samples must be at least 1"),
        ({"min_samples": 10**9}, "no role has"),
    ],
)
def test_wrong_requests_for_shakespeare(data_folder, params, message):
    with pytest.raises(DataError, match=message):
        load("shakespeare", **params)


def test_every_file_data_set_is_a_checked_federation(data_folder):
    for name in ("adult", "vehicle", "femnist"):
        fed = load(name)
        assert isinstance(fed, Federation) and fed.source["licence"]
        assert any(key.startswith("sha256 of") for key in fed.source)

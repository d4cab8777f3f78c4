"""Every data source on made files, and every mistake a person can make with one."""

from __future__ import annotations

import gzip
import pickle
import struct
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from peer.errors import UserError
from peer.learning import sources
from peer.learning.idx import read_idx
from peer.learning.sources import Dataset, load_dataset

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PANMESH_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PANMESH_DATA", raising=False)
    monkeypatch.setattr(sources, "_DEBIAN", tmp_path / "debian")
    monkeypatch.chdir(tmp_path)


def load(spec: str, seed: int = 0, classes: int | None = None) -> Dataset:
    return load_dataset(spec, seed=seed, classes=classes)


def refusal(spec: str, **options: Any) -> str:
    """Return message and hint of the refusal of `spec`, which must be one line each."""
    with pytest.raises(UserError) as caught:
        load(spec, **options)
    assert "\n" not in caught.value.message
    return f"{caught.value.message} | {caught.value.hint}"


# digits


def test_digits() -> None:
    from sklearn.datasets import load_digits

    data = load("digits", seed=1)
    assert (len(data.train_y), len(data.test_y)) == (1297, 500)
    assert (data.classes, data.shape, data.scale) == (10, (1, 8, 8), 1 / 16)
    rows = np.concatenate([data.train_x, data.test_x]).reshape(-1, 64)
    labels = np.concatenate([data.train_y, data.test_y])
    theirs = load_digits()
    ours = sorted(map(tuple, np.column_stack([rows, labels]).tolist()))
    assert ours == sorted(
        map(tuple, np.column_stack([theirs.data, theirs.target]).astype(int).tolist())
    )
    share = np.bincount(data.test_y) / np.bincount(labels)
    assert np.abs(share - 500 / 1797).max() < 0.01
    assert np.array_equal(load("digits", seed=2).test_x, data.test_x), "one split for all seeds"


# IDX


def idx_bytes(array: np.ndarray[Any, np.dtype[np.uint8]]) -> bytes:
    header = b"\0\0\x08" + bytes([array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def write_mnist(folder: Path, *, packed: bool = False, train: int = 12) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for part, m in (("train", train), ("t10k", 5)):
        for kind, array in (
            ("images-idx3", RNG.integers(256, size=(m, 4, 4), dtype=np.uint8)),
            ("labels-idx1", (np.arange(m) % 10).astype(np.uint8)),
        ):
            data = idx_bytes(array)
            name = f"{part}-{kind}-ubyte" + (".gz" if packed else "")
            (folder / name).write_bytes(gzip.compress(data) if packed else data)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_in_the_usual_places(
    name: str, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PANMESH_DATA", str(tmp_path / "data"))
    places = [tmp_path / "debian" / name, tmp_path / "cache" / "data" / name]
    places.append(tmp_path / "data" / name)
    for number, place in enumerate(places):  # a later place goes before those already there
        write_mnist(place, packed=packed, train=20 + number)
        assert len(load(name).train_y) == 20 + number
    write_mnist(tmp_path / "mine", packed=packed, train=11)
    data = load(f"{name}:mine")
    assert data.train_x.shape == (11, 1, 4, 4)
    assert data.train_x.dtype == np.uint8
    assert not data.train_x.flags.writeable, "mapped, not copied"
    assert data.scale == 1 / 255
    assert data.test_y.tolist() == [0, 1, 2, 3, 4]
    assert data.train_y.dtype == np.int64
    assert (data.classes, data.labels is None) == (10, name == "mnist")


def test_idx_that_is_not_there() -> None:
    assert "train-images-idx3-ubyte[.gz]" in refusal("mnist:nowhere")
    assert "apt install dataset-fashion-mnist" in refusal("fashion-mnist")


def test_gzip_is_unpacked_once_and_shared(tmp_path: Path) -> None:
    array = RNG.integers(256, size=(50, 4, 4), dtype=np.uint8)
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(idx_bytes(array)))
    results: list[Any] = []
    threads = [threading.Thread(target=lambda: results.append(read_idx(path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(np.array_equal(result, array) for result in results)
    (kept,) = (tmp_path / "cache" / "derived").iterdir()
    assert kept.read_bytes() == idx_bytes(array)
    path.write_bytes(gzip.compress(idx_bytes(array[:9])))
    assert read_idx(path).shape == (9, 4, 4), "a changed file is read anew"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PANMESH_CACHE", str(tmp_path / "file"))
    write_mnist(tmp_path / "packed", packed=True)
    assert load("mnist:packed").train_x.shape == (12, 1, 4, 4)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not an IDX file"),
        (b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0", "not an IDX file of unsigned bytes"),
        (b"\0\0\x08\x09", "not an IDX file"),
        (b"\0\0\x08\x03\0\0", "ends inside its header"),
        (b"\0\0\x08\x01\0\0\0\0", "holds no samples"),
        (b"\0\0\x08\x01\0\0\0\x02x", "shorter|has 9 bytes, but its header says 10"),
        (b"\0\0\x08\x01\0\0\0\x02xyz", "longer|has 11 bytes, but its header says 10"),
        (b"\0\0\x08\x03" + b"\xff" * 12, "cannot hold|but its header says"),
    ],
)
def test_damaged_idx(data: bytes, message: str, tmp_path: Path) -> None:
    plain, packed = tmp_path / "plain", tmp_path / "packed.gz"
    plain.write_bytes(data)
    packed.write_bytes(gzip.compress(data))
    for path in (plain, packed):
        with pytest.raises(UserError, match=message):
            read_idx(path)
    assert not list((tmp_path / "cache").rglob("*.idx"))


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.gz"
    good = gzip.compress(idx_bytes(RNG.integers(256, size=5000, dtype=np.uint8)))
    for data in (b"no gzip", good[:-2000], good[:100] + b"\0" * 300 + good[400:]):
        path.write_bytes(data)
        with pytest.raises(UserError, match=r"cannot unpack|shorter"):
            read_idx(path)


def test_labels_and_images_must_match(tmp_path: Path) -> None:
    write_mnist(tmp_path / "m")
    (tmp_path / "m" / "train-labels-idx1-ubyte").write_bytes(idx_bytes(np.zeros(3, np.uint8)))
    assert "12 inputs, but labels of shape (3,)" in refusal("mnist:m")


# CIFAR-10


def cifar_batch(seed: int, m: int = 6) -> tuple[Any, list[int]]:
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(m, 3072), dtype=np.uint8), rng.integers(10, size=m).tolist()


def write_cifar(folder: Path, kind: str) -> None:
    folder.mkdir(parents=True)
    for seed, name in enumerate(["data_batch_1", "data_batch_2", "test_batch"]):
        images, labels = cifar_batch(seed)
        if kind == "binary":
            records = np.column_stack([np.array(labels, dtype=np.uint8), images])
            (folder / f"{name}.bin").write_bytes(records.tobytes())
        else:
            batch = {b"data": images, b"labels": labels, b"filenames": [b"a.png"] * len(labels)}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=2))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize(
    ("kind", "inner"),
    [("binary", ""), ("python", ""), ("binary", "cifar-10-batches-bin")],
)
def test_cifar10(
    kind: str, inner: str, cached: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not cached:
        (tmp_path / "file").touch()
        monkeypatch.setenv("PANMESH_CACHE", str(tmp_path / "file"))
    write_cifar(tmp_path / "c" / inner, kind)
    data = load("cifar10:c")
    assert (data.shape, data.classes, data.scale) == ((3, 32, 32), 10, 1 / 255)
    assert data.labels is not None
    assert data.labels[9] == "truck"
    expected = [cifar_batch(seed) for seed in range(3)]
    images = np.concatenate([expected[0][0], expected[1][0]]).reshape(-1, 3, 32, 32)
    np.testing.assert_array_equal(data.train_x, images)
    assert data.train_y.tolist() == expected[0][1] + expected[1][1]
    np.testing.assert_array_equal(data.test_x.reshape(-1, 3072), expected[2][0])
    assert data.test_y.tolist() == expected[2][1]


def test_bad_cifar10(tmp_path: Path) -> None:
    assert "cifar-10-python.tar.gz" in refusal("cifar10:c")
    write_cifar(tmp_path / "b", "binary")
    (tmp_path / "b" / "data_batch_2.bin").write_bytes(bytes(3074))
    assert "not a whole number of CIFAR-10 records" in refusal("cifar10:b")
    (tmp_path / "b" / "data_batch_2.bin").write_bytes(b"\x0a" + bytes(3072))
    assert "label 10 is not among 0 to 9" in refusal("cifar10:b")
    write_cifar(tmp_path / "p", "python")
    images, labels = cifar_batch(9)
    for batch, message in (
        ({"data": images}, "no data and labels"),
        ({"data": images, "labels": labels[:-1]}, "5 labels"),
        ({"data": images, "labels": [10] * 6}, "0 to 9"),
        ({"data": images[:, :5], "labels": labels}, "shape (6, 5)"),
        ({"data": images, "labels": print}, "the name __builtin__.print"),
    ):
        (tmp_path / "p" / "data_batch_1").write_bytes(pickle.dumps(batch, protocol=2))
        assert message in refusal("cifar10:p")
    with (tmp_path / "p" / "data_batch_1").open("wb") as file:
        file.truncate(65 << 20)
    assert "too large" in refusal("cifar10:p")


# npz and import paths


def save(**arrays: Any) -> str:
    np.savez("d.npz", **arrays)
    return "npz:d.npz"


def test_npz() -> None:
    x, y = RNG.normal(size=(20, 3)), np.arange(20) % 4
    data = load(save(x=x, y=y))
    assert (len(data.train_y), len(data.test_y), data.classes, data.shape) == (16, 4, 4, (3,))
    assert data.train_x.dtype == np.float32
    assert data.scale == 1
    everything = np.concatenate([data.train_x, data.test_x])
    assert sorted(map(tuple, everything)) == sorted(map(tuple, x.astype(np.float32)))
    for part, labels in ((data.train_x, data.train_y), (data.test_x, data.test_y)):
        for row, label in zip(part, labels, strict=True):
            assert y[np.flatnonzero((x.astype(np.float32) == row).all(axis=1))[0]] == label
    split = load(save(x_train=x[:15], y_train=y[:15], x_test=x[15:], y_test=y[15:]))
    np.testing.assert_array_equal(split.test_x, x[15:].astype(np.float32))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((10, 5, 5), (1, 5, 5)),
        ((10, 5, 6, 3), (3, 5, 6)),
        ((10, 3, 5, 6), (3, 5, 6)),
        ((10, 3, 5, 3), (3, 5, 3)),
        ((10, 7), (7,)),
    ],
)
def test_image_axes(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    x = RNG.integers(256, size=shape, dtype=np.uint8)
    data = load(save(x=x, y=np.arange(10) % 2))
    assert data.shape == expected
    assert data.scale == 1 / 255
    assert data.train_x.dtype == np.uint8


def test_labels_as_names_floats_and_columns() -> None:
    x = np.zeros((6, 2))
    named = load(save(x=x, y=np.array(["dog", "cat"] * 3)))
    assert named.labels == ("cat", "dog")
    assert np.bincount(np.concatenate([named.train_y, named.test_y])).tolist() == [3, 3]
    assert load(save(x=x, y=np.array([[0.0], [2.0]] * 3))).classes == 3
    assert load(save(x=x, y=np.array(["0", "2"] * 3))).classes == 3


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"a": np.zeros(3)}, "it has a"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(4, int)}, "3 inputs, but labels of shape (4,)"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, 0.5, 1])}, "whole numbers"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, np.nan, 1])}, "whole numbers"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, -1, 1])}, "whole numbers from 0"),
        ({"x": np.zeros((3, 2)), "y": np.array([0, 1, 10**9])}, "whole numbers from 0"),
        ({"x": np.zeros((3, 2)), "y": np.zeros(3, int)}, "one class only"),
        ({"x": np.array([["a"], ["b"]]), "y": np.array([0, 1])}, "not numbers"),
        ({"x": np.array([[1], [np.inf]]), "y": np.array([0, 1])}, "input 1 (from 0) is not finite"),
        ({"x": np.array([[1e300], [1]]), "y": np.array([0, 1])}, "input 0 (from 0) is not finite"),
        ({"x": np.zeros(3), "y": np.arange(3)}, "no samples with features"),
        ({"x": np.zeros((0, 3)), "y": np.arange(0)}, "no samples"),
        ({"x": np.zeros((1, 3)), "y": np.arange(1)}, "one sample only"),
        ({"x": np.array([None, 1]), "y": np.arange(2)}, "cannot read"),
    ],
)
def test_bad_npz(arrays: dict[str, Any], message: str) -> None:
    assert message in refusal(save(**arrays))


def test_npz_files_that_are_none(tmp_path: Path) -> None:
    assert "cannot read 'nowhere.npz'" in refusal("npz:nowhere.npz")
    (tmp_path / "text.npz").write_text("hello")
    assert "pickle" not in refusal("npz:text.npz")
    assert "cannot read 'text.npz'" in refusal("npz:text.npz")
    np.save(tmp_path / "one.npy", np.zeros(3))
    assert "cannot read 'one.npy'" in refusal("npz:one.npy")
    (tmp_path / "cut.npz").write_bytes(Path(save(x=1)[4:]).read_bytes()[:60])
    assert "cannot read 'cut.npz'" in refusal("npz:cut.npz")


def test_shapes_of_parts_must_agree() -> None:
    y = np.arange(4) % 2
    spec = save(x_train=np.zeros((4, 2)), y_train=y, x_test=np.zeros((4, 3)), y_test=y)
    assert "training inputs are (2,), test inputs (3,)" in refusal(spec)


def test_import_path(tmp_path: Path) -> None:
    (tmp_path / "my_data_here.py").write_text(
        "import numpy as np\n"
        "from peer.learning.sources import Dataset\n"
        "x, y = np.ones((10, 2)), np.arange(10) % 2\n"
        "def pair(): return x, y\n"
        "def four(): return x, y, x[:3], y[:3]\n"
        "def whole(): return Dataset(x, y, x[:2], y[:2], 2, (2,), ('a', 'b'), 0.5)\n"
        "def none(): return None\n"
        "def broken(): raise KeyError('gone')\n"
    )
    assert len(load("my_data_here:pair").test_y) == 2
    assert len(load("my_data_here:four").test_y) == 3
    whole = load("my_data_here:whole#shard=1/2")
    assert (len(whole.train_y), whole.labels, whole.scale) == (5, ("a", "b"), 0.5)
    assert "returned NoneType" in refusal("my_data_here:none")
    assert "KeyError" in refusal("my_data_here:broken")
    assert "has no 'absent'" in refusal("my_data_here:absent")
    assert "cannot import" in refusal("no_such_module:f")


# csv


def table(text: str) -> str:
    Path("t.csv").write_text(text, encoding="utf-8")
    return "csv:t.csv"


def test_csv() -> None:
    spec = table("a,kind,b\n" + "".join(f"{i},{'yx'[i % 2]},{-i}\n" for i in range(10)) + "\n")
    data = load(spec + "#label=kind&test=0.3")
    assert (data.classes, data.shape, data.labels) == (2, (2,), ("x", "y"))
    assert (len(data.train_y), len(data.test_y)) == (7, 3)
    for row, label in zip(data.train_x, data.train_y, strict=True):
        assert row[0] == -row[1]
        assert label == 1 - row[0] % 2


def test_csv_with_numbers_as_labels() -> None:
    spec = table("\ufeffa,y\n1,0\n2,2\n3,0\n4,2\n") + "#label=y"
    assert load(spec).classes == 3
    assert load(spec, classes=7).classes == 7
    assert "label 2 is not among 0 to 1" in refusal(spec, classes=2)


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("a,y\n1,0\n", "", "add #label=COLUMN; its columns are a, y"),
        ("a,y\n1,0\n", "#label=z", "has no column 'z' | its columns are a, y"),
        ("", "#label=z", "the file is empty"),
        ("y\n1\n", "#label=y", "no column beside the label"),
        ("a,y\n1,0\n\nfoo,1\n", "#label=y", "t.csv, line 4: 'foo' in column 'a'"),
        ("a,y\n1,0\n,1\n", "#label=y", "line 3: '' in column 'a'"),
        ("a,y\nnan,0\n", "#label=y", "line 2: 'nan' in column 'a' is not a finite number"),
        ("a,y\n1,0\n1\n", "#label=y", "line 3: 1 cells, but the header has 2"),
        ("a,y\n", "#label=y", "no samples"),
        ("a,y\n1,0\n2,1\n", "#label=y&size=3", "takes no option 'size'"),
        ("a,y\n1,0\n", "#lable=y", "csv takes no option 'lable'"),
        (
            ",".join(f"c{i}" for i in range(65)),
            "",
            "its columns are " + ", ".join(f"c{i}" for i in range(12)) + " and 53 more",
        ),
        ("a,y\n1,u\n2,v\n", "#label=y", None),
    ],
)
def test_csv_mistakes(text: str, options: str, message: str | None) -> None:
    if message is None:
        assert "names 2 classes, but the plan has 3" in refusal(table(text) + options, classes=3)
    else:
        assert message in refusal(table(text) + options)


def test_csv_that_cannot_be_read(tmp_path: Path) -> None:
    assert "cannot read 'nowhere.csv'" in refusal("csv:nowhere.csv#label=y")
    (tmp_path / "t.csv").write_bytes(b"a,y\n\xff,1\n")
    assert "cannot read 't.csv'" in refusal("csv:t.csv#label=y")


# images


def write_images(folder: Path, counts: dict[str, int], mode: str = "RGB") -> None:
    for number, (name, count) in enumerate(sorted(counts.items())):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            colour = (number * 50, 100, 200) if mode == "RGB" else number * 50
            Image.new(mode, (6 + i, 4), colour).save(folder / name / f"{i}.png")


def test_images(tmp_path: Path) -> None:
    write_images(tmp_path / "f", {"cat": 5, "dog": 5, "emu": 0})
    (tmp_path / "f" / "cat" / "notes.txt").touch()
    data = load("images:f")
    assert (data.shape, data.classes, data.labels) == ((3, 4, 6), 3, ("cat", "dog", "emu"))
    assert (len(data.train_y), len(data.test_y)) == (8, 2)
    for image, label in zip(data.train_x, data.train_y, strict=True):
        assert image[:, 0, 0].tolist() == [label * 50, 100, 200]
    assert load("images:f#size=9").shape == (3, 9, 9)


def test_images_with_a_test_folder(tmp_path: Path) -> None:
    write_images(tmp_path / "f" / "train", {"0": 2, "3": 2}, mode="L")
    write_images(tmp_path / "f" / "test", {"3": 1}, mode="L")
    data = load("images:f")
    assert (data.shape, data.classes, data.labels) == ((1, 4, 6), 4, None)
    assert data.train_y.tolist() == [0, 0, 3, 3]
    assert data.test_y.tolist() == [3]
    assert "has a test set of its own" in refusal("images:f#test=0.5")


def test_bad_images(tmp_path: Path) -> None:
    assert "no folder 'f'" in refusal("images:f")
    (tmp_path / "f" / "a").mkdir(parents=True)
    assert "no .png or .jpg files" in refusal("images:f")
    write_images(tmp_path / "g", {"a": 2, "b": 2})
    assert "size=0 is not" in refusal("images:g#size=0")
    assert "size=x is not" in refusal("images:g#size=x")
    (tmp_path / "g" / "b" / "9.jpg").write_bytes(b"no picture")
    assert "9.jpg" in refusal("images:g")


# specs, splits, shards


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("digitz", "there are digits, fashion-mnist"),
        ("", "no data source ''"),
        ("digits:here", "digits takes no folder"),
        ("digits#shard", "cannot read 'shard'"),
        ("digits#shard=", "cannot read 'shard='"),
        ("digits#shard=1/3&shard=2/3", "cannot read 'shard=2/3'"),
        ("digits#shard=3/3", "shard=3/3 is not i/n"),
        ("digits#shard=-1/3", "is not i/n"),
        ("digits#shard=0/2000", "too few for 2000 shards"),
        ("digits#test=0.2", "has a test set of its own"),
        ("digits#test=2", "test=2 is not a share"),
        ("digits#test=nan", "test=nan is not a share"),
        ("digits#test=x", "test=x is not a share"),
        ("digits#label=y", "takes no option 'label'"),
    ],
)
def test_bad_specs(spec: str, message: str) -> None:
    assert message in refusal(spec)


def test_shards_do_not_overlap_and_leave_nothing() -> None:
    whole = load("digits", seed=3)
    shards = [load(f"digits#shard={i}/7", seed=3) for i in range(7)]
    assert {len(shard.train_y) for shard in shards} == {185, 186}
    rows = np.concatenate([s.train_x.reshape(-1, 64) for s in shards]).tolist()
    assert sorted(rows) == sorted(whole.train_x.reshape(-1, 64).tolist())
    assert all(np.array_equal(shard.test_x, whole.test_x) for shard in shards)
    assert not np.array_equal(load("digits#shard=0/7", seed=4).train_x, shards[0].train_x)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.data())
def test_stratified_splits(labels: list[int], data: st.DataObject) -> None:
    y = np.array(labels)
    count = data.draw(st.integers(1, len(y) - 1))
    rest, chosen = sources._stratified(y, count, np.random.default_rng(1))
    assert len(chosen) == count
    assert sorted([*rest, *chosen]) == list(range(len(y)))
    for c in np.unique(y):
        expected = count * (y == c).sum() / len(y)
        assert abs((y[chosen] == c).sum() - expected) <= 1

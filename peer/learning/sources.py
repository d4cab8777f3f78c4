"""Where data come from: `load_dataset` turns a short text, a *spec*, into a `Dataset`.

A spec is a source's name, an argument after a colon where it takes one, and options after `#`:

    digits | fashion-mnist[:FOLDER] | mnist[:FOLDER] | cifar10[:FOLDER] | npz:FILE
    csv:FILE#label=COLUMN[&group=COLUMN] | images:FOLDER[#size=N] | module:function
    text:FILE[#words=V&window=L&vocabulary=FILE&topic=N]
    ...#shard=i/n&test=FRACTION

`shard` keeps the i-th (from 0) of n shares of the training data; `test` is the share held out for
testing where the data have no test set of their own (0.2 if not given). A new source is one
function and one line in `SOURCES`, and one in `OPTIONS` if it has any.
"""

from __future__ import annotations

import array
import csv
import gzip
import importlib.util
import io
import math
import os
import zipfile
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from peer.errors import UserError
from peer.learning import cifar, corpus
from peer.learning.cache import cache_folder
from peer.learning.idx import read_idx
from peer.learning.local_import import import_callable
from peer.randomness import Purpose, generator

Array = npt.NDArray[Any]
Labels = npt.NDArray[np.int64]
_Found = TypeVar("_Found")

DEFAULT_TEST = 0.2
MAX_CLASSES = 100_000


@dataclass(frozen=True)
class Dataset:
    """Inputs x [m, *shape] as stored (bytes, or float32), labels y int64 [m] in 0 to classes - 1.

    `shape` is that of one input, channels first for images; a model takes x * `scale`. Of a text,
    inputs are token ids (int32) in 0 to classes - 1, and the label is the next word. `labels` are
    the names of the classes, where they have names. Where the data fall into groups by themselves
    (sites, writers, topics), `groups` names them, sorted, and `train_group` and `test_group` are,
    [m] each, the number of a sample's. `left_out` are the columns of a table that are no features.
    Byte inputs may be mapped from the disk.
    """

    train_x: Array
    train_y: Labels
    test_x: Array
    test_y: Labels
    classes: int
    shape: tuple[int, ...]
    labels: tuple[str, ...] | None = None
    scale: float = 1.0
    groups: tuple[str, ...] = ()
    train_group: Labels | None = None
    test_group: Labels | None = None
    left_out: tuple[str, ...] = ()


class Samples(NamedTuple):
    """What a source has read: (inputs, labels) to train and, if it has them, to test.

    Of sources that have no test set, `group` names the group of each training sample, and `item`
    numbers what it was cut from: that is held out for testing whole. Inputs that are int32 are
    taken for token ids if `text`.
    """

    train: tuple[Array, Array]
    test: tuple[Array, Array] | None = None
    labels: tuple[str, ...] | None = None
    scale: float = 1.0
    group: Sequence[str] | None = None
    left_out: tuple[str, ...] = ()
    item: Labels | None = None
    text: bool = False


def is_text(x: Array) -> bool:
    """Tell whether inputs of a `Dataset` are token ids."""
    return bool(x.dtype == np.int32)


def load_dataset(spec: str, *, seed: int, classes: int | None = None) -> Dataset:
    """Return the data set that `spec` names (see the module's text).

    `seed` decides splits and shards. `classes` is the federation's number of classes, where these
    data may lack some. Raises UserError, in one line, for whatever cannot be used.
    """
    request = parse_spec(spec)
    name, options = request.text, request.options
    fraction, shard = _fraction(options.pop("test", None)), _shard(options.pop("shard", None))
    samples = request.read(request)
    train = _checked(*samples.train, f"{name}, training data", text=samples.text)
    groups: tuple[str, ...] = ()
    train_group = test_group = None
    if samples.test is None:
        names, group = np.unique(samples.group or [""] * len(train[1]), return_inverse=True)
        share = fraction or DEFAULT_TEST
        if samples.item is None:
            kept, held = _split(train[1], group, share, seed, name)
        else:
            kept, held = _split_items(samples.item, group, share, seed, name)
        train, test = _take(train, kept), _take(train, held)
        if samples.group is not None:
            groups, train_group, test_group = tuple(names.tolist()), group[kept], group[held]
    elif fraction is not None:
        raise UserError(f"{name} has a test set of its own", "leave out test=")
    else:
        test = _checked(*samples.test, f"{name}, test data", text=samples.text)
    if shard is not None:
        chosen = _shard_indices(len(train[1]), shard, seed, name)
        train = _take(train, chosen)
        train_group = None if train_group is None else train_group[chosen]
    shape = train[0].shape[1:]
    if test[0].shape[1:] != shape:
        raise UserError(f"{name}: training inputs are {shape}, test inputs {test[0].shape[1:]}")
    largest = max(int(train[1].max()), int(test[1].max()))
    count = _class_count(largest, samples.labels, classes, name)
    if is_text(train[0]) and not all(_among(x, count) for x in (train[0], test[0])):
        raise UserError(f"{name}: token ids must be from 0 to {count - 1}")
    return Dataset(
        *train,
        *test,
        classes=count,
        shape=shape,
        labels=samples.labels,
        scale=samples.scale,
        groups=groups,
        train_group=train_group,
        test_group=test_group,
        left_out=samples.left_out,
    )


# Specs


@dataclass(frozen=True)
class Request:
    """A spec taken apart: `text` before the options, `argument` after the colon, the options."""

    read: Source
    text: str
    argument: str
    options: dict[str, str]


Source = Callable[[Request], Samples]


def parse_spec(spec: str) -> Request:
    """Take a spec apart. Raises UserError for a source or an option that there is not."""
    text, _, tail = spec.partition("#")
    name, colon, argument = text.partition(":")
    if name not in SOURCES and not colon:
        known = ", ".join(SOURCES)
        raise UserError(f"there is no data source {text!r}", f"there are {known}, module:function")
    options: dict[str, str] = {}
    for part in filter(None, tail.split("&")):
        key, _, value = part.partition("=")
        if not value or key in options:
            raise UserError(f"cannot read {part!r} in {spec!r}", "write #key=value&key=value")
        if key not in (allowed := (*OPTIONS.get(name, ()), *COMMON_OPTIONS)):
            raise UserError(
                f"{name} takes no option {key!r} (in {spec!r})", f"there are {', '.join(allowed)}"
            )
        options[key] = value
    if name in SOURCES:
        return Request(SOURCES[name], text, argument, options)
    return Request(_read_import, text, text, options)


def enumerated(names: Sequence[str], most: int = 12) -> str:
    """Return the names, the first `most` of them and how many there are more, for people."""
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _fraction(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise UserError(f"test={text} is not a share between 0 and 1", "write, say, test=0.2")
    return value


def _shard(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    i, _, n = text.partition("/")
    if not (i.isdecimal() and n.isdecimal() and int(i) < int(n)):
        raise UserError(f"shard={text} is not i/n with 0 <= i < n", "the first of 8 is shard=0/8")
    return int(i), int(n)


# What every source's samples go through


def _among(x: Array, count: int) -> bool:
    return int(x.min()) >= 0 and int(x.max()) < count


def _checked(x: Array, y: Array, what: str, *, text: bool = False) -> tuple[Array, Labels]:
    """Return inputs as bytes, float32 or (token ids of a text) int32, and labels as int64.

    Raises UserError that says what is wrong with them.
    """
    if len(x) == 0 or x.ndim < 2:
        raise UserError(f"{what}: inputs of shape {x.shape} hold no samples with features")
    if y.shape != (len(x),):
        raise UserError(f"{what}: {len(x)} inputs, but labels of shape {y.shape}")
    if x.dtype.kind not in "biuf":
        raise UserError(f"{what}: inputs are of type {x.dtype}, not numbers")
    if x.dtype != np.uint8 and not (text and is_text(x)):
        with np.errstate(over="ignore"):
            x = np.asarray(x, dtype=np.float32)
        finite = np.isfinite(x.reshape(len(x), -1)).all(axis=1)
        if not finite.all():
            raise UserError(f"{what}: input {int(np.argmin(finite))} (from 0) is not finite")
    if y.dtype.kind not in "iu" or int(y.min()) < 0 or int(y.max()) >= MAX_CLASSES:
        raise UserError(f"{what}: labels must be whole numbers from 0 to {MAX_CLASSES - 1}")
    return x, y.astype(np.int64)


def _class_count(
    largest: int, labels: tuple[str, ...] | None, classes: int | None, name: str
) -> int:
    """Return the number of classes, given the largest label that occurs."""
    if labels is not None and classes is not None and len(labels) != classes:
        # Which name has which number depends on all the names: a gap cannot be guessed.
        raise UserError(
            f"{name} names {len(labels)} classes, but the plan has {classes}",
            f"number the classes from 0 to {classes - 1}, the same at every peer",
        )
    count = classes or (len(labels) if labels is not None else largest + 1)
    if largest >= count:
        raise UserError(f"{name}: label {largest} is not among 0 to {count - 1}")
    if count < 2:
        raise UserError(f"{name} has one class only: there is nothing to learn")
    return count


def _take(samples: tuple[Array, Labels], chosen: Labels) -> tuple[Array, Labels]:
    x, y = samples
    return x[chosen], y[chosen]


def _split(
    y: Labels, group: Labels, fraction: float, seed: int, name: str
) -> tuple[Labels, Labels]:
    """Return indices (train, test): every group's and class's share, to one sample."""
    if len(y) < 2:
        raise UserError(f"{name} has one sample only: none is left to test on")
    count = min(max(1, round(fraction * len(y))), len(y) - 1)
    kinds = group * (int(y.max()) + 1) + y
    return _stratified(kinds, count, generator(seed, Purpose.TEST_SPLIT))


def _split_items(
    item: Labels, group: Labels, fraction: float, seed: int, name: str
) -> tuple[Labels, Labels]:
    """Return indices (train, test) of samples: every group's share of items, each item whole."""
    _, first, number = np.unique(item, return_index=True, return_inverse=True)
    parts = _split(np.zeros_like(first), group[first], fraction, seed, name)
    train, test = (np.flatnonzero(np.isin(number, part)) for part in parts)
    return train, test


def _stratified(
    y: Labels, count: int, rng: np.random.Generator
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return indices (rest, chosen): `count` of `y` [m], each class's share to one sample.

    Systematic sampling: evenly spaced places of the shuffled samples sorted by class.
    """
    order = rng.permutation(len(y))
    order = order[np.argsort(y[order], kind="stable")]
    places = (2 * np.arange(count) + 1) * len(y) // (2 * count)
    return np.sort(np.delete(order, places)), np.sort(order[places])


def _shard_indices(m: int, shard: tuple[int, int], seed: int, name: str) -> Labels:
    """Return contiguous share i of n of m shuffled training samples; shares do not overlap."""
    i, n = shard
    if n > m:
        raise UserError(f"{name} has {m} training samples: too few for {n} shards")
    order = generator(seed, Purpose.PARTITION).permutation(m)
    return np.sort(order[i * m // n : (i + 1) * m // n])


def _numbered(names: Collection[str]) -> tuple[dict[str, int], tuple[str, ...] | None]:
    """Return (class number of each name, names of the classes).

    [choice] Whole numbers are class numbers as they are, so that a peer may lack some; other names
    are numbered in sorted order.
    """
    if all(name.isdecimal() and len(name) <= 6 for name in names):
        return {name: int(name) for name in names}, None
    ordered = tuple(sorted(names))
    return {name: number for number, name in enumerate(ordered)}, ordered


# Built-in sources


def _read_digits(request: Request) -> Samples:
    """scikit-learn's 1,797 digits of 8 x 8, read from its package without importing it (76 MB)."""
    if request.argument:
        raise UserError("digits takes no folder: it comes with scikit-learn")
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise UserError("digits needs scikit-learn", "pip install scikit-learn")
    path = Path(package.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    try:
        table = np.loadtxt(io.BytesIO(gzip.decompress(path.read_bytes())), np.uint8, delimiter=",")
    except OSError as error:
        raise UserError(f"scikit-learn's digits cannot be read: {error}") from None
    x, y = table[:, :-1].reshape(-1, 1, 8, 8), table[:, -1].astype(np.int64)
    # [choice] One split for all seeds, as other data sets come with one: results compare.
    train, test = _stratified(y, 500, generator(0, Purpose.TEST_SPLIT))
    return Samples((x[train], y[train]), (x[test], y[test]), scale=1 / 16)


_FASHION = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag",
    "Ankle boot",
)  # fmt: skip
_IDX_FILES = tuple(
    f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")
)
_DEBIAN = Path("/usr/share/datasets")
"""Where Debian's packages dataset-* put their files."""


def _read_fashion_mnist(request: Request) -> Samples:
    hint = (
        "apt install dataset-fashion-mnist, or get it from github.com/zalandoresearch/fashion-mnist"
    )
    return _read_mnist_like("fashion-mnist", request.argument, _FASHION, hint)


def _read_mnist(request: Request) -> Samples:
    hint = "get it from ossci-datasets.s3.amazonaws.com/mnist"
    return _read_mnist_like("mnist", request.argument, None, hint)


def _read_mnist_like(
    name: str, argument: str, labels: tuple[str, ...] | None, hint: str
) -> Samples:
    def find(folder: Path) -> list[Path] | None:
        found = [_idx_file(folder, file) for file in _IDX_FILES]
        return [path for path in found if path] if all(found) else None

    wanted = f"{_IDX_FILES[0]}[.gz] and the other three"
    files = _find(name, argument, find, wanted, hint)
    train_x, train_y, test_x, test_y = (read_idx(path) for path in files)
    for images in (train_x, test_x):
        if images.ndim != 3:
            raise UserError(f"{name}: the image file has {images.ndim} axes, not 3")
    return Samples((train_x[:, None], train_y), (test_x[:, None], test_y), labels, 1 / 255)


def _idx_file(folder: Path, name: str) -> Path | None:
    names = (name, f"{name}.gz", name.replace("-idx", ".idx"))
    return next((folder / n for n in names if (folder / n).is_file()), None)


def _read_cifar10(request: Request) -> Samples:
    hint = "unpack cifar-10-binary.tar.gz or cifar-10-python.tar.gz from cs.toronto.edu/~kriz"
    wanted = "data_batch_1[.bin] and the others"
    train, test = _find("cifar10", request.argument, cifar.find_batches, wanted, hint)
    return Samples(cifar.read_batches(train), cifar.read_batches([test]), cifar.LABELS, 1 / 255)


def _find(
    name: str, argument: str, find: Callable[[Path], _Found | None], wanted: str, hint: str
) -> _Found:
    """Return what `find` finds in the first of the usual folders that has it."""
    folders = [Path(argument).expanduser()] if argument else list(_usual_folders(name))
    for folder in folders:
        if (found := find(folder)) is not None:
            return found
    places = ", ".join(str(folder) for folder in folders)
    raise UserError(f"{name}: no {wanted} in {places}", f"{hint}; then write {name}:FOLDER")


def _usual_folders(name: str) -> Iterator[Path]:
    if folder := os.environ.get("PANMESH_DATA"):
        yield Path(folder) / name
    if cache := cache_folder():
        yield cache / "data" / name
    yield _DEBIAN / name


def _read_npz(request: Request) -> Samples:
    path = request.argument
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
    except OSError as error:
        raise UserError(f"cannot read {path!r} as npz: {error.strerror or error}") from None
    except (ValueError, EOFError, zipfile.BadZipFile, AttributeError, TypeError):
        # numpy's own words are of use to who calls it only.
        raise UserError(f"cannot read {path!r} as npz: it is no npz file of plain arrays") from None
    for keys in (("x_train", "y_train", "x_test", "y_test"), ("x", "y")):
        if all(key in arrays for key in keys):
            return _from_arrays(tuple(arrays[key] for key in keys), path)
    raise UserError(
        f"{path} has no x and y, nor x_train, y_train, x_test and y_test",
        f"it has {enumerated(sorted(arrays)) or 'nothing'}",
    )


def _read_import(request: Request) -> Samples:
    path = request.argument
    function = import_callable(path, "data")
    try:
        result = function()
    except UserError:
        raise
    except Exception as error:  # a person's function may raise anything
        raise UserError(f"data: {path} failed: {type(error).__name__}: {error}") from error
    if isinstance(result, Dataset):
        train, test = (result.train_x, result.train_y), (result.test_x, result.test_y)
        text = is_text(result.train_x) and is_text(result.test_x)
        return Samples(train, test, result.labels, result.scale, text=text)
    if not isinstance(result, tuple) or len(result) not in (2, 4):
        raise UserError(
            f"data: {path} returned {type(result).__name__}",
            "return a Dataset, (x, y) or (x_train, y_train, x_test, y_test)",
        )
    return _from_arrays(tuple(np.asarray(item) for item in result), path)


def _from_arrays(arrays: tuple[Array, ...], source: str) -> Samples:
    """Return the samples of (x, y) or (x_train, y_train, x_test, y_test).

    [choice] [m, h, w] are images of one channel; the last axis of [m, h, w, c] is moved first when
    only it can be the channels; bytes are scaled to [0, 1].
    """
    inputs, targets = [_channels_first(x) for x in arrays[::2]], list(arrays[1::2])
    labels = None
    if any(y.dtype.kind in "US" for y in targets):
        texts = [y.astype(str).ravel() for y in targets]
        numbers, labels = _numbered({str(name) for y in texts for name in np.unique(y)})
        targets = [np.array([numbers[str(name)] for name in y], dtype=np.int64) for y in texts]
    targets = [_whole(y.reshape(-1) if y.shape[1:] == (1,) else y, source) for y in targets]
    pairs = list(zip(inputs, targets, strict=True))
    scale = 1 / 255 if all(x.dtype == np.uint8 for x in inputs) else 1.0
    return Samples(pairs[0], pairs[1] if len(pairs) == 2 else None, labels, scale)


def _whole(y: Array, source: str) -> Array:
    if y.dtype.kind != "f":
        return y
    if not np.isfinite(y).all() or (y != np.floor(y)).any():
        raise UserError(f"{source}: labels must be whole numbers or names")
    return y.astype(np.int64)


def _channels_first(x: Array) -> Array:
    if x.ndim == 3:
        return x[:, None]
    if x.ndim == 4 and x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
        return np.moveaxis(x, 3, 1)
    return x


def _read_csv(request: Request) -> Samples:
    """Read a table with a header; every column but the label's and the group's is a number."""
    path = request.argument
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file)
            header = next(rows, [])
            group = request.options.get("group")
            columns = _special_columns(request.options.get("label"), group, header, path)
            x, *texts = _read_rows(rows, header, columns, path)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"cannot read {path!r} as CSV: {error}") from None
    names = texts[0]
    numbers, labels = _numbered(set(names))
    y = np.array([numbers[name] for name in names], dtype=np.int64)
    left_out = tuple(header[place] for place in columns)
    return Samples((x, y), labels=labels, group=texts[1] if group else None, left_out=left_out)


def _special_columns(
    label: str | None, group: str | None, header: list[str], path: str
) -> list[int]:
    """Return the places of the label's column and, if one is named, the group's."""
    columns = f"its columns are {enumerated(header)}" if header else "the file is empty"
    if label is None:
        raise UserError(f"{path}: which column is the label?", f"add #label=COLUMN; {columns}")
    special = [label] if group is None else [label, group]
    for name in special:
        if name not in header:
            raise UserError(f"{path} has no column {name!r}", columns)
    if len(header) <= len(set(special)):
        raise UserError(f"{path} has no column beside the {'label' if group is None else 'two'}")
    return [header.index(name) for name in special]


def _read_rows(rows: Any, header: list[str], special: list[int], path: str) -> tuple[Any, ...]:
    """Return features [m, columns] of a csv.reader's rows, and the texts [m] of special columns."""
    features = [name for place, name in enumerate(header) if place not in special]
    values: array.array[float] = array.array("f")
    texts: list[list[str]] = [[] for _ in special]
    count = 0
    for row in rows:
        if not row:
            continue
        where = f"{path}, line {rows.line_num}"
        if len(row) != len(header):
            raise UserError(f"{where}: {len(row)} cells, but the header has {len(header)}")
        for place, column in zip(special, texts, strict=True):
            column.append(row[place].strip())
        cells = [cell for place, cell in enumerate(row) if place not in special]
        values.extend(
            _number(cell, name, where) for cell, name in zip(cells, features, strict=True)
        )
        count += 1
    return np.frombuffer(values, dtype=np.float32).reshape(count, len(features)), *texts


def _number(cell: str, column: str, where: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where}: {cell!r} in column {column!r} is not a finite number")
    return number


def _read_text(request: Request) -> Samples:
    """Read items of text, and cut them into windows and the word that follows."""
    path, most = Path(request.argument).expanduser(), MAX_CLASSES - 1
    if "words" in request.options and "vocabulary" in request.options:
        raise UserError("words= and vocabulary= exclude each other")
    items = corpus.read_items(path, _count(request, "topic", 1, most))
    if file := request.options.get("vocabulary"):
        vocabulary = corpus.read_vocabulary(Path(file).expanduser(), most)
    else:
        vocabulary = corpus.most_frequent(items.words, _count(request, "words", corpus.WORDS, most))
    length = _count(request, "window", corpus.WINDOW, corpus.MAX_WINDOW)
    x, y, item = corpus.windows(items.words, vocabulary, length)
    group = None if items.topics is None else [items.topics[i] for i in item.tolist()]
    return Samples((x, y), labels=vocabulary, group=group, item=item, text=True)


def _count(request: Request, key: str, default: int, most: int) -> int:
    """Return the whole number of an option."""
    value = request.options.get(key, str(default))
    if not (value.isdecimal() and len(value) <= 9 and 1 <= int(value) <= most):
        raise UserError(f"{key}={value} is not a number from 1 to {most}")
    return int(value)


_IMAGE_SUFFIXES = {".png", ".jpg", ".jpeg"}


def _read_images(request: Request) -> Samples:
    """Read FOLDER/<class>/*.png, or FOLDER/train/<class> and FOLDER/test/<class>."""
    folder = Path(request.argument).expanduser()
    if not folder.is_dir():
        raise UserError(f"there is no folder {request.argument!r}")
    parts = [folder / "train", folder / "test"] if (folder / "train").is_dir() else [folder]
    parts = [part for part in parts if part.is_dir()]
    classes = {path.name for part in parts for path in part.iterdir() if path.is_dir()}
    files = [[path for name in sorted(classes) for path in _image_files(p / name)] for p in parts]
    if not files[0]:
        raise UserError(f"there are no .png or .jpg files in {parts[0]}/<class>/")
    size, mode = _image_form(files[0][0], request.options.get("size"))
    numbers, labels = _numbered(classes)
    pairs = [
        (
            np.stack([_read_image(path, size, mode) for path in paths]),
            np.array([numbers[path.parent.name] for path in paths], dtype=np.int64),
        )
        for paths in files
        if paths
    ]
    return Samples(pairs[0], pairs[1] if len(pairs) == 2 else None, labels, 1 / 255)


def _image_files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.suffix.lower() in _IMAGE_SUFFIXES)


def _image_form(first: Path, size: str | None) -> tuple[tuple[int, int], str]:
    """Return (width, height) and colour mode that all images are brought to: those of the first."""
    from PIL import Image

    if size is not None and not (size.isdecimal() and 1 <= int(size) <= 4096):
        raise UserError(f"size={size} is not a number of pixels from 1 to 4096")
    try:
        with Image.open(first) as image:
            mode = "L" if image.getbands()[0] in ("1", "L", "I", "F") else "RGB"
            return image.size if size is None else (int(size), int(size)), mode
    except (OSError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot read the image {first}: {error}") from None


def _read_image(path: Path, size: tuple[int, int], mode: str) -> npt.NDArray[np.uint8]:
    """Return one image [channels, height, width]."""
    from PIL import Image

    try:
        with Image.open(path) as image:
            pixels = np.asarray(image.convert(mode).resize(size), dtype=np.uint8)
    except (OSError, ValueError, Image.DecompressionBombError) as error:
        raise UserError(f"cannot read the image {path}: {error}") from None
    return pixels[None] if mode == "L" else np.moveaxis(pixels, 2, 0)


SOURCES: dict[str, Source] = {
    "digits": _read_digits,
    "fashion-mnist": _read_fashion_mnist,
    "mnist": _read_mnist,
    "cifar10": _read_cifar10,
    "npz": _read_npz,
    "csv": _read_csv,
    "images": _read_images,
    "text": _read_text,
}

COMMON_OPTIONS = ("shard", "test")
OPTIONS: dict[str, tuple[str, ...]] = {
    "csv": ("label", "group"),
    "images": ("size",),
    "text": ("words", "window", "vocabulary", "topic"),
}
"""Options of a source beside the common ones."""

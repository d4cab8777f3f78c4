"""What was learned, used elsewhere: files that open without panmesh, and predictions."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from live import command
from PIL import Image
from safetensors import safe_open
from sklearn.datasets import load_digits

from peer import Plan, Result, export_model, load_model, run
from peer.errors import StateError, UserError
from peer.export import predict_file

PLAN = Plan.model_validate(
    {"n": 2, "rounds": 3, "method": "random", "partition": {"train_per_peer": 100}}
)
Images = npt.NDArray[np.float32]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(PLAN, state=tmp_path_factory.mktemp("learned"))[0]


@pytest.fixture(scope="module")
def digits() -> tuple[Images, npt.NDArray[np.int64]]:
    found: Any = load_digits()
    return (found.images[:200, None] / 16).astype(np.float32), found.target[:200]


def test_a_model_predicts_as_well_as_it_scored(
    learned: Result, digits: tuple[Images, npt.NDArray[np.int64]]
) -> None:
    x, y = digits
    assert np.mean(learned.predict(x) == y) > learned.scores.accuracy - 0.1
    # A flat row a sample is the same sample.
    np.testing.assert_array_equal(learned.predict(x.reshape(200, -1)), learned.predict(x))


def test_named_weights_are_those_of_the_model(learned: Result, tmp_path: Path) -> None:
    learned.export(tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="numpy") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert file.metadata()["round"] == "3"
    np.testing.assert_array_equal(
        np.sort(np.concatenate([a.ravel() for a in arrays.values()])), np.sort(learned.model)
    )
    assert {name: a.shape for name, a in load_model(learned.state).arrays.items()} == {
        name: a.shape for name, a in arrays.items()
    }


def from_torch(path: Path) -> Callable[[Images], npt.NDArray[Any]]:
    import torch

    module = torch.export.load(path).module()
    return lambda x: module(torch.from_numpy(x)).argmax(1).numpy()


def from_onnx(path: Path) -> Callable[[Images], npt.NDArray[Any]]:
    from onnx.reference import ReferenceEvaluator

    session = ReferenceEvaluator(str(path))
    (name,) = session.input_names
    return lambda x: session.run(None, {name: x})[0].argmax(1)


@pytest.mark.parametrize(("ending", "load"), [("pt2", from_torch), ("onnx", from_onnx)])
def test_other_programs_get_the_same_predictions(
    learned: Result,
    digits: tuple[Images, npt.NDArray[np.int64]],
    tmp_path: Path,
    ending: str,
    load: Callable[[Path], Callable[[Images], npt.NDArray[Any]]],
) -> None:
    pytest.importorskip({"pt2": "torch", "onnx": "onnxscript"}[ending])
    path = tmp_path / f"model.{ending}"
    learned.export(path)
    model = load(path)
    for x in (digits[0], digits[0][:7]):  # any number of samples
        np.testing.assert_array_equal(model(x), learned.predict(x))


def test_export_says_what_it_cannot_do(learned: Result, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="names no format"):
        learned.export(tmp_path / "model.bin")
    with pytest.raises(UserError, match="no format 'pickle'"):
        learned.export(tmp_path / "model.bin", "pickle")
    for ending in ("safetensors", "pt2", "onnx"):
        with pytest.raises(UserError, match="cannot write"):
            learned.export(tmp_path / "nowhere" / f"model.{ending}")
    with pytest.raises(UserError, match="holds 2 replicas") as told:
        export_model(learned.state.parent, tmp_path / "model.safetensors")
    assert told.value.hint == f"name one: --state {learned.state}"
    with pytest.raises(UserError, match="no peer has finished a round"):
        export_model(tmp_path, tmp_path / "model.safetensors")
    for name in ("checkpoint-0.safetensors", "checkpoint-1.safetensors"):
        (tmp_path / name).write_bytes(b"torn")
    with pytest.raises(StateError, match="damaged"):
        export_model(tmp_path, tmp_path / "model.safetensors")


def test_an_estimator_is_exported_as_weights_only(tmp_path: Path) -> None:
    plan = PLAN.model_copy(update={"model": "sklearn-sgd", "rounds": 1})
    result = run(plan, state=tmp_path)[0]
    result.export(tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="not a torch model"):
        result.export(tmp_path / "model.pt2")


@pytest.mark.slow
def test_the_command_exports_and_predicts_files_of_all_kinds(
    learned: Result, digits: tuple[Images, npt.NDArray[np.int64]], tmp_path: Path
) -> None:
    x, y = digits[0][:20], digits[1][:20]
    expected = [str(c) for c in learned.predict(x)]
    state = ("--state", str(learned.state))

    wrote = command("export", *state, "--out", str(tmp_path / "model.safetensors"))
    assert (wrote.returncode, wrote.stdout.split()[0]) == (0, "wrote")

    np.savez(tmp_path / "x.npz", x=x)
    assert command("predict", *state, str(tmp_path / "x.npz")).stdout.split() == expected

    with (tmp_path / "x.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["kind", *(f"p{i}" for i in range(64))])
        table.writerows([label, *row] for label, row in zip(y, x.reshape(20, -1), strict=True))
    named = ("--label", "kind", "--out", str(tmp_path / "out.txt"))
    done = command("predict", *state, str(tmp_path / "x.csv"), *named)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out.txt").read_text().split() == expected

    nowhere = str(tmp_path / "nowhere" / "out.txt")
    for flags in ([str(tmp_path / "out.txt")], [str(tmp_path / "x.npz"), "--out", nowhere]):
        refused = command("predict", *state, *flags)
        assert refused.returncode == 2
        assert refused.stderr.startswith("error: ")
        assert refused.stderr.count("\n") == 1
    assert refused.stderr == f"error: cannot use {nowhere}: No such file or directory\n"


def test_a_table_with_the_label_is_predicted_without_it(tmp_path: Path) -> None:
    rows = "".join(f"{i % 2},{i},{'yx'[i % 2]},s{i % 2}\n" for i in range(40))
    (tmp_path / "t.csv").write_text("a,b,kind,site\n" + rows)
    plan = Plan(n=2, rounds=1, method="local", data="own", model="sklearn-sgd")
    data = f"csv:{tmp_path / 't.csv'}#label=kind&group=site"
    state = run(plan, state=tmp_path / "state", index=0, replicas=2, data=data)[0].state
    assert len(predict_file(state, tmp_path / "t.csv")) == 40
    (tmp_path / "u.csv").write_text("a,b,other\n1,2,x\n")
    with pytest.raises(UserError, match="3 columns of features, the model takes 2") as told:
        predict_file(state, tmp_path / "u.csv")
    assert "--label COLUMN" in told.value.hint
    assert len(predict_file(state, tmp_path / "u.csv", label="other")) == 1


def test_an_image_is_predicted_as_its_pixels(learned: Result, tmp_path: Path) -> None:
    found: Any = load_digits()
    # The data set's pixels go from 0 to 16, an image's from 0 to 255.
    pixels = np.round(found.images[0] * (255 / 16)).astype(np.uint8)
    Image.fromarray(pixels).resize((32, 32), Image.Resampling.NEAREST).save(tmp_path / "zero.png")
    line = predict_file(learned.state, tmp_path / "zero.png")
    assert line == [str(c) for c in learned.predict(found.images[:1, None] / 16)]

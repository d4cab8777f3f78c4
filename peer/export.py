"""Using what a peer learned: its model as a file for elsewhere, and its predictions.

Both need the state directory only: the newest checkpoint holds the weights, `model.json` how to
build the model around them. The data it was trained on are not needed.
"""

from __future__ import annotations

import csv
import io
import warnings
import zipfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError
from safetensors.numpy import save

from peer.errors import UserError
from peer.files import write_atomically
from peer.learning.corpus import prompt
from peer.learning.learner import Learner, ModelCard, Vector
from peer.learning.partition import blank_inputs
from peer.learning.sources import enumerated
from peer.settings import replica_states
from peer.state import MODEL_CARD, Checkpoint, newest_checkpoint

FORMATS = {".safetensors": "safetensors", ".pt2": "torch", ".onnx": "onnx"}
_CARD = TypeAdapter(ModelCard)


class LearnedModel:
    """The model of a state directory's last finished round, ready for use."""

    def __init__(self, learner: Learner, card: ModelCard, checkpoint: Checkpoint) -> None:
        self.card = card
        self.checkpoint = checkpoint
        self._learner = learner

    @property
    def arrays(self) -> dict[str, Vector]:
        """The weights by name."""
        return self._learner.manifest.unflatten(self.checkpoint.model)

    def predict(self, inputs: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Return the class [m] of each input [m, *shape], scaled as the training inputs were.

        Raises UserError when the inputs have another shape or are not finite numbers.
        """
        inputs = np.asarray(inputs)
        if inputs.dtype.kind not in "buif" or not np.isfinite(inputs).all():
            raise UserError("the inputs are not all finite numbers")
        if self.card.text and not (np.isin(inputs, np.arange(self.card.classes))).all():
            raise UserError(f"the inputs are not all token ids from 0 to {self.card.classes - 1}")
        wanted = self.card.shape
        # One row a sample serves flat tables of images, and images without their channel, too.
        if inputs.ndim < 1 or inputs.size != len(inputs) * int(np.prod(wanted)):
            raise UserError(f"inputs of shape {inputs.shape[1:]} do not fit the model's {wanted}")
        shaped = inputs.reshape(len(inputs), *wanted)
        return self._learner.predict(self.checkpoint.model, shaped)

    def labels(self, classes: npt.NDArray[np.int64]) -> list[str]:
        """Return the names of classes, their numbers where they have no names."""
        names = self.card.labels
        return [str(c) if names is None else names[c] for c in classes.tolist()]

    def export(self, out: Path, form: str) -> None:
        """Write the model as safetensors, torch (torch.export) or onnx. Raises UserError."""
        writers: dict[str, Callable[[Path], None]] = {
            "safetensors": self._write_safetensors,
            "torch": self._write_torch,
            "onnx": self._write_onnx,
        }
        if form not in writers:
            raise UserError(f"there is no format {form!r}", f"there are {', '.join(writers)}")
        if not out.parent.is_dir():
            raise UserError(f"cannot write {out}: there is no directory {out.parent}")
        try:
            writers[form](out)
        except OSError as error:
            raise UserError(f"cannot write {out}: {error.strerror or error}") from None

    def _write_safetensors(self, out: Path) -> None:
        card = _CARD.dump_json(self.card).decode()
        metadata = {"card": card, "plan": self.checkpoint.plan, "round": str(self.checkpoint.t)}
        write_atomically(out, save(self.arrays, metadata=metadata))

    def _write_torch(self, out: Path) -> None:
        import torch

        module, example, dynamic = self._traceable()
        file = io.BytesIO()  # of files that it cannot write, torch says so in many ways, too
        with warnings.catch_warnings():
            # torch's own doubts about the views that its exporter, or an LSTM, made of the weights.
            warnings.simplefilter("ignore", UserWarning)
            try:
                program = torch.export.export(module, (example,), dynamic_shapes=dynamic)
            except Exception as error:  # what torch cannot trace, it says in many ways
                raise UserError(f"torch.export does not take this model: {_line(error)}") from error
            torch.export.save(program, file)
        write_atomically(out, file.getvalue())

    def _write_onnx(self, out: Path) -> None:
        import torch

        try:
            import_module("onnxscript")  # torch's exporter needs it
        except ImportError:
            raise UserError(
                "ONNX export needs extra packages", "pip install 'panmesh[onnx]'"
            ) from None
        module, example, dynamic = self._traceable()
        try:
            torch.onnx.export(
                module, (example,), out, dynamo=True, dynamic_shapes=dynamic, verbose=False
            )
        except Exception as error:
            raise UserError(f"ONNX does not take this model: {_line(error)}") from error

    def _traceable(self) -> tuple[Any, Any, Any]:
        """Return a torch module with the weights, an example batch, and its free dimension."""
        import torch

        from peer.learning.torch_learner import TorchLearner

        if not isinstance(self._learner, TorchLearner):
            raise UserError(f"{self.card.model} is not a torch model", "use --format safetensors")
        module = self._learner.module(self.checkpoint.model)
        example = torch.from_numpy(blank_inputs(2, self.card.shape, text=self.card.text))
        return module, example, ({0: torch.export.Dim("batch")},)


def load_model(state: Path) -> LearnedModel:
    """Return the model of a state directory's last finished round.

    Raises UserError when there is none, StateError when it is damaged.
    """
    from peer.learning.build import rebuild

    checkpoint = newest_checkpoint(state)
    if checkpoint is None:
        if replicas := replica_states(state):
            raise UserError(
                f"{state} holds {len(replicas)} replicas", f"name one: --state {replicas[0]}"
            )
        raise UserError(f"no peer has finished a round in {state}", "give its --state directory")
    try:
        card = _CARD.validate_json((state / MODEL_CARD).read_bytes())
    except (OSError, ValidationError) as error:
        raise UserError(
            f"{state / MODEL_CARD} does not say what the model is: {_line(error)}"
        ) from None
    learner = rebuild(card)
    if learner.manifest.size != checkpoint.model.size:
        raise UserError(f"the model of {state} has changed: its factory makes another layout now")
    return LearnedModel(learner, card, checkpoint)


def export_model(state: Path, out: Path, form: str | None = None) -> str:
    """Write the model of a state directory to `out`; return the format, by the ending if not given.

    Raises UserError.
    """
    chosen = form or FORMATS.get(out.suffix)
    if chosen is None:
        raise UserError(
            f"the ending of {out} names no format", f"use {', '.join(FORMATS)}, or --format"
        )
    load_model(state).export(out, chosen)
    return chosen


def predict_file(state: Path, file: Path, *, label: str | None = None) -> list[str]:
    """Return the predicted class of each sample in a file: npz (key x), csv or an image.

    `label` is a column of a csv to leave out, beside those that the training left out. For a model
    of text, a file that is no npz is a text, and each line's next word is predicted. Raises
    UserError.
    """
    model = load_model(state)
    try:
        match file.suffix:
            case ".npz":
                inputs = _read_npz(file)
            case _ if model.card.text:
                inputs = _read_prompts(file, model.card)
            case ".csv":
                inputs = _read_csv(file, label, model.card)
            case _:
                inputs = _read_image(file, model.card.shape)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror or error}") from None
    except (UnicodeDecodeError, csv.Error) as error:
        kind = "text" if model.card.text else "CSV"
        raise UserError(f"cannot read {file} as {kind}: {error}") from None
    scaled = inputs * np.float32(model.card.scale) if inputs.dtype == np.uint8 else inputs
    return model.labels(model.predict(scaled))


def _read_npz(file: Path) -> npt.NDArray[Any]:
    try:
        with np.load(file, allow_pickle=False) as arrays:
            for key in ("x", "x_test"):
                if key in arrays:
                    found: npt.NDArray[Any] = arrays[key]
                    return found
            names = enumerated(arrays.files)
    except (ValueError, zipfile.BadZipFile, EOFError, AttributeError, TypeError):
        raise UserError(f"{file} is not an npz file of plain arrays") from None
    raise UserError(f"{file} has no array x", f"it has {names}")


def _read_prompts(file: Path, card: ModelCard) -> npt.NDArray[Any]:
    lines = file.read_text(encoding="utf-8-sig").splitlines()
    numbers = {word: number for number, word in enumerate(card.labels or ())}
    prompts = [prompt(line, numbers, card.shape[0]) for line in lines if line.strip()]
    return np.array(prompts, dtype=np.int32).reshape(len(prompts), *card.shape)


def _read_csv(file: Path, label: str | None, card: ModelCard) -> npt.NDArray[Any]:
    with file.open(newline="", encoding="utf-8-sig") as lines:
        rows = csv.reader(lines)
        header = next(rows, [])
        if label is not None and label not in header:
            raise UserError(f"{file} has no column {label!r}", f"it has {enumerated(header)}")
        left_out = {label, *card.left_out}
        kept = [column for column, name in enumerate(header) if name not in left_out]
        wanted = int(np.prod(card.shape))
        if len(kept) != wanted:
            raise UserError(
                f"{file} has {len(kept)} columns of features, the model takes {wanted}",
                "--label COLUMN leaves a column out",
            )
        values = []
        for number, row in enumerate(rows, start=2):
            try:
                values.append([float(row[column]) for column in kept])
            except (ValueError, IndexError):
                raise UserError(
                    f"{file} line {number} is not {len(kept)} numbers",
                    "--label COLUMN leaves a column out",
                ) from None
    return np.array(values, dtype=np.float32).reshape(len(values), len(kept))


def _read_image(file: Path, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    from PIL import Image, UnidentifiedImageError

    if len(shape) != 3:
        raise UserError(f"the model takes inputs of shape {shape}, not images")
    channels, height, width = shape
    try:
        with Image.open(file) as image:
            mode = "L" if channels == 1 else "RGB"
            pixels = np.asarray(image.convert(mode).resize((width, height)), dtype=np.uint8)
    except (UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise UserError(f"{file} is neither npz, csv nor an image: {_line(error)}") from None
    return pixels.reshape(1, height, width, channels).transpose(0, 3, 1, 2)


def _line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:200]

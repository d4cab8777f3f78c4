"""JSON files that tell when they were damaged: a checksum is over everything they say."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import from_json

from peer.errors import StateError
from peer.files import write_atomically

_CHECKSUM = "checksum"


class Sealed(BaseModel):
    """What one JSON file holds; in the file, a field `checksum` stands beside the others."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def write(self, path: Path, *, mode: int = 0o644) -> None:
        """Replace `path`, atomically. Raises OSError."""
        fields = self.model_dump(mode="json")
        sealed = {**fields, _CHECKSUM: _checksum(fields)}
        write_atomically(path, json.dumps(sealed, indent=1), mode=mode)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Return what `write` wrote to `path`.

        Raises FileNotFoundError when it is not there, StateError when it is anything else.
        """
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as error:
            raise StateError(f"cannot read {path}: {error.strerror}") from None
        try:
            fields: Any = from_json(content)
            if not isinstance(fields, dict):
                raise ValueError("not an object")
            if fields.pop(_CHECKSUM, None) != _checksum(fields):
                raise ValueError("its checksum does not fit")
            return cls.model_validate(fields)
        except ValidationError:
            raise StateError(f"{path} is damaged: it lacks what belongs into it") from None
        except ValueError as error:
            raise StateError(f"{path} is damaged: {error}") from None


def _checksum(fields: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

"""Every exception that panmesh raises on purpose, in one place.

Two families, because they end differently: a `UserError` is a person's mistake (a flag, a file, a
plan) and ends a command with one line, a hint and exit code 2; a `ProtocolError` is bad input from
the network and is counted, logged once a peer and dropped.
"""

from __future__ import annotations


class PanmeshError(Exception):
    """Base of all errors that panmesh raises on purpose."""


class UserError(PanmeshError):
    """A person's mistake: a flag, a file or a plan that cannot be used.

    `message` says what is wrong in one line; `hint`, if not empty, what to do about it.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ProtocolError(PanmeshError):
    """Bytes from the network that the protocol does not allow; all that a decoder ever raises."""


class VersionError(ProtocolError):
    """A message of another version of the protocol."""


class ForgedError(ProtocolError):
    """What a peer sent contradicts what it sent before."""


class RefusedError(PanmeshError):
    """Another node answered a request with a refusal; `reason` is its machine-readable word."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


class UnreachableError(PanmeshError):
    """A request got no answer in its time, or its connection could not be made."""


class NotAdmittedError(UnreachableError):
    """A node that was asked does not take this one for a member of its federation."""


class StateError(PanmeshError):
    """A state directory whose contents cannot be trusted: damaged, of another plan, or in use.

    `message` and `hint` as of a `UserError`.
    """

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class FederationError(PanmeshError):
    """A process of a federation failed, or did not end in time; ends with the tail of its log."""


def first_failure(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure to report: a person's mistake before anything else."""
    flat: list[BaseException] = []
    pending: list[BaseException] = [failures]
    while pending:
        failure = pending.pop()
        if isinstance(failure, BaseExceptionGroup):
            pending.extend(failure.exceptions)
        else:
            flat.append(failure)
    return min(flat, key=lambda failure: not isinstance(failure, UserError | StateError))

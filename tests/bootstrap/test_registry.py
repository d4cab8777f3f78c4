"""The registry: who gets which index, and that it survives whatever happens to its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bootstrap.registry import Registry
from peer.errors import RefusedError, StateError
from peer.network.messages import PeerRecord, Reason

A, B, C, D = ("a" * 32, "b" * 32, "c" * 32, "d" * 32)
PLAN = "1" * 32


def registry(n: int = 3, *, model: str | None = None, plan: str = PLAN) -> Registry:
    return Registry(n=n, plan=plan, model=model, reclaim_after=60.0)


def record(peer: str, index: int, model: str = "e" * 32) -> PeerRecord:
    return PeerRecord(
        peer=peer,
        index=index,
        control="tcp://127.0.0.1:1",
        data="tcp://127.0.0.1:2",
        incarnation=1,
        first_round=1,
        model=model,
    )


def refusal(call: object, *arguments: object) -> str:
    assert callable(call)
    with pytest.raises(RefusedError) as error:
        call(*arguments)
    return error.value.reason


def test_lowest_free_index_or_the_wanted_one() -> None:
    book = registry()
    assert book.enrol(A, None, 0.0) == 0
    assert book.enrol(B, 2, 0.0) == 2
    assert book.enrol(C, 2, 0.0) == 1
    assert [book.enrol(peer, None, 1.0) for peer in (A, B, C)] == [0, 2, 1]
    assert book.enrol(A, 1, 1.0) == 0
    assert refusal(book.enrol, D, 3, 1.0) == Reason.BAD_REQUEST


def test_index_is_taken_back_from_the_longest_unseen() -> None:
    book = registry()
    for now, peer in enumerate((A, B, C)):
        book.enrol(peer, None, float(now))
    book.announce(record(A, 0), 10.0)
    assert refusal(book.enrol, D, None, 60.9) == Reason.FULL
    assert book.enrol(D, None, 61.0) == 1
    assert book.index_of(B) is None
    assert refusal(book.enrol, B, None, 61.0) == Reason.FULL


def test_index_that_is_free_is_not_taken_back() -> None:
    book = registry()
    book.enrol(A, None, 0.0)
    assert book.enrol(B, None, 1000.0) == 1
    assert book.enrol(A, None, 1000.0) == 0


def test_announcer_without_an_index_is_taken_in() -> None:
    book = registry()
    book.announce(record(A, 2), 0.0)
    assert book.enrol(B, None, 0.0) == 0
    assert book.enrol(A, None, 0.0) == 2
    assert refusal(book.announce, record(B, 2), 0.0) == Reason.INDEX_CLASH
    assert refusal(book.announce, record(C, 3), 0.0) == Reason.INDEX_CLASH
    book.announce(record(B, 2), 60.0)
    assert (book.index_of(A), book.index_of(B)) == (None, 2)


def test_first_announcers_model_counts_while_it_is_used() -> None:
    book = registry()
    book.announce(record(A, 0), 0.0)
    assert refusal(book.announce, record(B, 1, "f" * 32), 59.0) == Reason.MODEL_MISMATCH
    book.announce(record(B, 1, "f" * 32), 60.0)
    assert refusal(book.announce, record(A, 0), 61.0) == Reason.MODEL_MISMATCH


def test_plans_model_counts_always() -> None:
    book = registry(model="f" * 32)
    assert refusal(book.announce, record(A, 0), 0.0) == Reason.MODEL_MISMATCH
    book.announce(record(A, 0, "f" * 32), 0.0)


def test_saved_and_loaded(tmp_path: Path) -> None:
    book = registry()
    book.load(tmp_path, 0.0)
    unsaved = [book.changed]
    book.enrol(A, 2, 0.0)
    book.announce(record(B, 0), 0.0)
    unsaved.append(book.changed)
    book.save(tmp_path)
    unsaved.append(book.changed)
    assert unsaved == [False, True, False]
    again = registry()
    again.load(tmp_path, 1000.0)
    assert (again.index_of(A), again.index_of(B), again.index_of(C)) == (2, 0, None)
    assert again.enrol(C, None, 1000.0) == 1
    # Nobody counts as lost because the node itself was away.
    assert refusal(again.enrol, D, None, 1059.0) == Reason.FULL
    assert [path.name for path in tmp_path.iterdir()] == ["registry.json"]


def test_saved_model_is_replaced_once_nobody_uses_it(tmp_path: Path) -> None:
    book = registry()
    book.announce(record(A, 0), 0.0)
    book.save(tmp_path)
    again = registry()
    again.load(tmp_path, 100.0)
    assert refusal(again.announce, record(B, 1, "f" * 32), 159.0) == Reason.MODEL_MISMATCH
    again.announce(record(B, 1, "f" * 32), 160.0)


@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"plan": 1}', "changed", "truncated"])
def test_damaged_file_is_told(tmp_path: Path, damage: str) -> None:
    book = registry()
    book.enrol(A, None, 0.0)
    book.save(tmp_path)
    path = tmp_path / "registry.json"
    text = path.read_text()
    fields = json.loads(text)
    fields["holders"][A] = 1
    path.write_text({"changed": json.dumps(fields), "truncated": text[:-20]}.get(damage, damage))
    with pytest.raises(StateError, match=r"registry\.json is damaged"):
        registry().load(tmp_path, 0.0)


def test_file_of_another_plan_is_told(tmp_path: Path) -> None:
    registry().save(tmp_path)
    with pytest.raises(StateError, match="another plan"):
        registry(plan="2" * 32).load(tmp_path, 0.0)

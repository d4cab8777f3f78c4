"""Text as samples of a next-word model: exact words, vocabularies and windows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peer.errors import UserError
from peer.learning import corpus
from peer.learning.build import make_learner, prepare
from peer.learning.corpus import most_frequent, prompt, read_items, tokenise, windows
from peer.learning.partition import deal
from peer.learning.sources import Dataset, load_dataset
from peer.plan import Plan

NEWS = """"2","Cup final","A late goal; the team's ""best"" win."
"1","War","Peace, at last,
at the border."
"2","Again","The team won."
"""


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def refusal(spec: str, **options: Any) -> str:
    with pytest.raises(UserError) as caught:
        load_dataset(spec, seed=0, **options)
    assert "\n" not in caught.value.message
    return f"{caught.value.message} | {caught.value.hint}"


def test_words() -> None:
    assert tokenise("Don't stop: it\u2019s 4-2, \u00dcber_all 'quoted' \\n#39;") == [
        "don't", "stop", "it\u2019s", "4", "2", "\u00fcber", "all", "quoted", "n", "39",
    ]  # fmt: skip


def test_items_of_lines_and_of_rows(tmp_path: Path) -> None:
    lines = write(tmp_path / "a.txt", "One two.\n\nThree\n")
    assert read_items(lines) == ([["one", "two"], ["three"]], None)
    rows = read_items(write(tmp_path / "news.csv", NEWS))
    assert rows.topics == ["2", "1", "2"]
    assert rows.words[1] == ["war", "peace", "at", "last", "at", "the", "border"]
    headed = write(tmp_path / "headed.csv", "Topic,Title,Text\n" + NEWS)
    assert read_items(headed) == rows, "a topic that no other row has is the header's"
    last = write(tmp_path / "last.csv", "a b,x\nc,y\nd,y\n")
    assert read_items(last, topic=2) == ([["c"], ["d"]], ["y", "y"])


def test_a_vocabulary_is_ordered_by_frequency_and_then_by_spelling() -> None:
    items = [["b", "a", "c"], ["c", "b", "d"]]
    assert most_frequent(items, 3) == ("<unk>", "b", "c", "a")
    assert most_frequent(items[::-1], 99) == ("<unk>", "b", "c", "a", "d")


def test_windows_lie_inside_an_item_and_end_in_a_known_word() -> None:
    items = [["a", "x", "b", "a", "x"], ["b"], ["b", "b", "a"]]
    found = windows(items, ("<unk>", "a", "b"), 2)
    assert found.x.tolist() == [[1, 0], [0, 2], [2, 2]]  # [2, 1] -> x is left out
    assert found.y.tolist() == [2, 1, 1]
    assert found.item.tolist() == [0, 0, 2]
    assert (found.x.dtype, found.y.dtype) == (np.int32, np.int64)
    with pytest.raises(UserError, match="no item has 5 words"):
        windows(items, ("<unk>", "a", "b"), 5)


def test_a_prompt_is_the_last_words() -> None:
    numbers = {"<unk>": 0, "a": 1, "b": 2}
    assert prompt("A b x B a", numbers, 3).tolist() == [0, 2, 1]
    assert prompt("b", numbers, 3).tolist() == [0, 0, 2]
    assert prompt("", numbers, 2).tolist() == [0, 0]


def articles(count: int) -> str:
    """Return items of 6 words, of two topics, the number of each among its words."""
    return "".join(f"{'ab'[i % 2]},one two three four five n{i}\n" for i in range(count))


def test_whole_items_are_held_out_of_every_topic(tmp_path: Path) -> None:
    path = write(tmp_path / "news.csv", articles(40))
    data = load_dataset(f"text:{path}#window=3&words=99&test=0.25", seed=3)
    assert (data.shape, data.classes, data.groups) == ((3,), 46, ("a", "b"))
    assert data.labels is not None
    assert data.labels[:6] == ("<unk>", "five", "four", "one", "three", "two")
    assert (len(data.train_y), len(data.test_y)) == (3 * 30, 3 * 10)
    assert data.train_group is not None
    assert data.test_group is not None
    assert np.bincount(data.test_group).tolist() == [15, 15]
    names = [
        {data.labels[y] for y in part.tolist() if data.labels[y][0] == "n"}
        for part in (data.train_y, data.test_y)
    ]
    assert (len(names[0]), len(names[1]), names[0] & names[1]) == (30, 10, set())
    for y, group in zip(data.test_y.tolist(), data.test_group.tolist(), strict=True):
        if data.labels[y][0] == "n":
            assert int(data.labels[y][1:]) % 2 == group


def test_natural_clusters_are_the_topics(tmp_path: Path) -> None:
    path = write(tmp_path / "news.csv", articles(40))
    data = load_dataset(f"text:{path}#window=3&words=99", seed=3)
    plan = Plan.model_validate({"n": 4, "partition": {"kind": "natural", "clusters": 2}})
    shares = [deal(data, plan, i, own=False) for i in range(4)]
    assert [len(share.train_y) for share in shares] == [24] * 4
    for i, share in enumerate(shares):
        assert share.train_x.dtype == share.test_x.dtype == np.int32
        labels = [(data.labels or ())[y] for y in (*share.train_y, *share.test_y)]
        assert {int(word[1:]) % 2 for word in labels if word[0] == "n"} == {i % 2}


def test_a_vocabulary_file_makes_peers_agree(tmp_path: Path) -> None:
    words = write(tmp_path / "words.txt", "three\ntwo\nfive\n")
    path = write(tmp_path / "mine.txt", "one two three four\n" * 4)
    data = load_dataset(f"text:{path}#window=1&vocabulary={words}", seed=0, classes=4)
    assert data.labels == ("<unk>", "three", "two", "five")
    pairs = zip(data.train_x[:, 0].tolist(), data.train_y.tolist(), strict=True)
    assert set(pairs) == {(0, 2), (2, 1)}
    assert "4 classes, but the plan has 3" in refusal(
        f"text:{path}#window=1&vocabulary={words}", classes=3
    )
    for text, why in (
        ("One\n", "'One' is no word in lower case"),
        ("a b\n", "'a b' is no word"),
        ("a\nb\na\n", "'a' is 2 times there"),
        ("\n", "has 0 words"),
    ):
        write(words, text)
        assert why in refusal(f"text:{path}#vocabulary={words}")


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "cannot read" in refusal(f"text:{tmp_path / 'none.txt'}")
    assert "line 2: 1 cells" in refusal(f"text:{write(tmp_path / 'a.csv', 'a,b' + chr(10) + 'c')}")
    (tmp_path / "b.txt").write_bytes(b"\xff\xfe\x00")
    assert "as text" in refusal(f"text:{tmp_path / 'b.txt'}")
    path = write(tmp_path / "c.txt", "a b c d\n" * 9)
    assert "window=0 is not a number from 1 to 256" in refusal(f"text:{path}#window=0")
    assert "exclude each other" in refusal(f"text:{path}#words=3&vocabulary={path}")
    assert "takes no option 'label'" in refusal(f"text:{path}#label=1")
    monkeypatch.setattr(corpus, "MAX_VALUES", 26)
    assert "27 windows of 1 words are too many" in refusal(f"text:{path}#window=1")
    monkeypatch.setattr(corpus, "MAX_BYTES", 60)
    assert "more than" in refusal(f"text:{path}")


def test_token_ids_from_a_function_are_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    write(
        tmp_path / "tokens_of_mine.py",
        "import numpy as np\nfrom peer.learning.sources import Dataset\n"
        "x, y = np.array([[0, 1], [1, 2]], dtype=np.int32), np.array([2, 0])\n"
        "def good(): return Dataset(x, y, x, y, 3, (2,))\n"
        "def bad(): return Dataset(x + 1, y, x, y, 3, (2,))\n",
    )
    good = load_dataset("tokens_of_mine:good", seed=0)
    assert (good.train_x.dtype, good.train_x.tolist()) == (np.int32, [[0, 1], [1, 2]])
    assert "token ids must be from 0 to 2" in refusal("tokens_of_mine:bad")


def test_the_model_learns_what_follows(tmp_path: Path) -> None:
    """A cycle of seven words: the word before says it all, and chance has perplexity 7."""
    path = write(tmp_path / "cycle.txt", "a b c d e f g a b c d e f g\n" * 30)
    plan = Plan.model_validate(
        {
            "n": 2, "model": "lstm", "data": "own",
            "training": {"lr": 0.2, "epochs": 6, "batch": 20},
        }
    )  # fmt: skip
    learner, card = prepare(plan, 0, data=f"text:{path}#window=2")
    assert (card.text, card.shape, card.labels) == (True, (2,), ("<unk>", *"abcdefg"))
    # Embedding of 8 words; one layer of 4 gates, with two biases; output.
    size = 8 * 64 + 4 * 128 * (64 + 128 + 2) + 128 * 8 + 8
    assert learner.manifest.size == learner.manifest.trainable == size
    model = learner.fit(learner.initial(), 1)
    np.testing.assert_array_equal(model, learner.fit(learner.initial(), 1))
    before, after = learner.evaluate(learner.initial()), learner.evaluate(model)
    assert before.loss == pytest.approx(np.log(8), rel=0.1)
    assert (after.accuracy, after.loss < 0.5) == (1, True)
    assert learner.predict(model, np.array([[6, 7], [2, 3]])).tolist() == [1, 4]


def test_models_take_text_or_numbers(tmp_path: Path) -> None:
    text = f"text:{write(tmp_path / 'a.txt', 'a b c d' + chr(10) + 'b c d a')}#window=1"
    table = {"n": 2, "data": "own", "model": "mlp"}
    for model in ("mlp", "sklearn-sgd"):
        with pytest.raises(UserError, match=f"the model {model} takes numbers, not text"):
            make_learner(Plan.model_validate(table | {"model": model}), 0, data=text)
    with pytest.raises(UserError, match="the model lstm takes text, not numbers"):
        make_learner(Plan.model_validate(table | {"model": "lstm"}), 0, data="digits")


def test_integers_of_other_sources_stay_numbers(tmp_path: Path) -> None:
    x, y = np.arange(20, dtype=np.int32).reshape(10, 2), np.arange(10) % 2
    np.savez(tmp_path / "a.npz", x=x, y=y)
    data: Dataset = load_dataset(f"npz:{tmp_path / 'a.npz'}", seed=0)
    assert data.train_x.dtype == np.float32

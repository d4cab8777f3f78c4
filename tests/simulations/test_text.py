"""Text through everything: the engine, a run of CFL by topics, its figures, and the device."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import numpy as np
import pytest

from peer import load_model, run
from peer.errors import UserError
from peer.export import predict_file
from peer.learning.build import prepare
from peer.plan import Plan
from peer.plan_check import check_plan
from peer.rundir import perplexity, read_metrics, read_plan, read_topology
from simulations.engine.workers import Engine
from simulations.gallery import pictures_of_run
from simulations.runs import Equipment, PopulationMaker, run_population
from simulations.study import Line
from simulations.tables import study_table

ROUND_ABOUT = {"letters": "a b c d e f g h", "backwards": "h g f e d c b a"}

PLAN = Plan.model_validate(
    {
        "n": 4,
        "rounds": 3,
        "method": "cfl",
        "model": "lstm",
        "data": "own",
        "partition": {"kind": "natural", "clusters": 2, "train_per_peer": 60},
        "training": {"lr": 0.2},
    }
)


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("text") / "topics.csv"
    rows = [f"{topic},{words} {words}\n" for topic, words in ROUND_ABOUT.items()]
    path.write_text("".join(rows) * 30, encoding="utf-8")
    return f"text:{path}#window=2"


def test_the_engine_trains_it_as_the_device_does(
    spec: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    with Engine(PLAN, data=spec, workers=0) as engine:
        assert not engine.stacked
        engine.train(1)
        learners = [prepare(PLAN, i, data=spec, dealt=True)[0] for i in range(PLAN.n)]
        expected = [learner.fit(learner.initial(), 1) for learner in learners]
        assert np.array_equal(engine.trained, expected)
        assert engine.losses(1, [(0, 1), (2, 3)]) == pytest.approx(
            [learners[0].train_losses([expected[1]], 1)[0],
             learners[2].train_losses([expected[3]], 1)[0]]
        )  # fmt: skip
        engine.reset(expected)
        assert engine.evaluate()[3] == pytest.approx(learners[3].evaluate(expected[3]))
    with Engine(PLAN, data=spec, workers=0):
        told = [r.message for r in caplog.records if "one peer at a time" in r.message]
    assert len(told) <= 1, "the user is told once"


def test_a_run_tells_its_perplexity(spec: str, tmp_path: Path) -> None:
    with PopulationMaker(Equipment(reference=True, data=spec)) as maker:
        summary = run_population(PLAN, tmp_path / "run", maker=maker)
    losses = [row.loss for row in read_metrics(tmp_path / "run") if row.t == 3]
    assert summary["perplexity"] == pytest.approx(math.exp(sum(filter(None, losses)) / 4))
    assert 1 < summary["perplexity"] < 9
    run = tmp_path / "run"
    pictures = pictures_of_run(run, read_plan(run), read_metrics(run), read_topology(run))
    drawn = {own.name: own.figure for own in pictures}
    assert {"perplexity", "clustering"} <= drawn.keys()
    assert drawn["clustering"].axes[0].get_ylabel() == "perplexity"
    first, *_, mean = drawn["perplexity"].axes[0].lines
    assert np.asarray(first.get_ydata())[-1] == pytest.approx(math.exp(losses[0] or 0))
    assert np.asarray(mean.get_ydata())[-1] == pytest.approx(summary["perplexity"])


def test_perplexity_is_of_text_only() -> None:
    assert perplexity(PLAN, math.log(42)) == pytest.approx(42)
    assert perplexity(PLAN, None) is None
    assert perplexity(Plan(n=2), 1.0) is None


def test_tables_have_a_column_for_it_where_there_is_one() -> None:
    line = Line(
        labels={}, variant="cfl", seeds=1, accuracy_mean=0.2, accuracy_sd=None,
        accuracy_worst=0.1, below_local=0.0, precision=1.0, recall=1.0, clusters_found=2.0,
        bytes_moved=10.0, seconds=1.0, runs=(), perplexity=36.25,
    )  # fmt: skip
    columns = [column.header for column in study_table([line]).columns]
    assert columns[:3] == ["method", "perplexity", "accuracy, %"]
    assert list(study_table([line]).columns[1].cells) == ["36.2"]


def test_a_plan_of_images_is_refused() -> None:
    with pytest.raises(UserError, match="lstm needs text, and digits has images"):
        check_plan(Plan(n=2, model="lstm"))


def test_a_peer_predicts_the_next_word_of_each_line(spec: str, tmp_path: Path) -> None:
    plan = Plan.model_validate(
        {
            "n": 2, "rounds": 2, "method": "random", "model": "lstm", "data": "own",
            "matching": {"k": 1}, "training": {"lr": 0.2, "epochs": 5},
        }
    )  # fmt: skip
    text = tmp_path / "letters.txt"
    text.write_text(f"{ROUND_ABOUT['letters']} {ROUND_ABOUT['letters']}\n" * 40, encoding="utf-8")
    learned = run(plan, state=tmp_path / "state", data=f"text:{text}#window=2")[0]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("now: A, b\n\nc d e f\n", encoding="utf-8")
    assert predict_file(learned.state, prompts) == ["c", "g"]
    model = load_model(learned.state)
    with pytest.raises(UserError, match="not all token ids from 0 to 8"):
        model.predict(np.array([[1, 9]]))
    learned.export(tmp_path / "model.pt2")
    import torch

    program = torch.export.load(tmp_path / "model.pt2").module()
    x = np.array([[1, 2], [3, 4], [7, 8]], dtype=np.int32)
    np.testing.assert_array_equal(program(torch.from_numpy(x)).argmax(1), learned.predict(x))

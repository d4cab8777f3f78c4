from __future__ import annotations

from peer.merit import clusters_found, precision, recall

CLUSTERS = [0, 1, 0, 1, 0, 1]


def test_precision_is_the_share_of_the_bag() -> None:
    assert precision({2, 4}, 0, CLUSTERS) == 1.0
    assert precision([1, 2, 3, 4], 0, CLUSTERS) == 0.5
    assert precision({0, 2}, 1, CLUSTERS) == 0.0
    assert precision(frozenset(), 0, CLUSTERS) is None


def test_recall_is_the_share_of_the_cluster_without_oneself() -> None:
    assert recall({2, 4}, 0, CLUSTERS) == 1.0
    assert recall({1, 2, 3}, 0, CLUSTERS) == 0.5
    assert recall({1}, 0, CLUSTERS) == 0.0
    assert recall((), 0, CLUSTERS) is None
    assert recall({1}, 0, [0, 1, 1]) is None


def test_a_single_cluster_has_neither() -> None:
    assert precision({1, 2}, 0, [0, 0, 0]) is None
    assert recall({1, 2}, 0, [0, 0, 0]) is None


def test_clusters_are_components_of_mutual_membership() -> None:
    assert clusters_found({0: [1], 1: [0, 2], 2: [1], 3: [4], 4: [3]}) == 2
    assert clusters_found({0: [1], 1: [2], 2: [0]}) == 3
    assert clusters_found({0: [], 1: [], 2: [9]}) == 3
    assert clusters_found({0: [1, 2], 1: [0], 2: []}) == 2


def test_a_thousand_peers_that_all_share_one_model_are_one_cluster() -> None:
    everyone = range(1000)
    assert clusters_found({i: [j for j in everyone if j != i] for i in everyone}) == 1
    assert clusters_found({i: [i - 1, i + 1] for i in everyone}) == 1

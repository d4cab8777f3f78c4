"""Figures of merit of a matching, where the true clusters are known."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence


def precision(bag: Collection[int], index: int, clusters: Sequence[int]) -> float | None:
    """Return the share of `bag` that is of the true cluster of `index`.

    None when the bag is empty, or all are of one cluster: nothing is then right or wrong.
    """
    if not bag or _single(clusters):
        return None
    return sum(clusters[j] == clusters[index] for j in bag) / len(bag)


def recall(bag: Collection[int], index: int, clusters: Sequence[int]) -> float | None:
    """Return the share of the other members of the true cluster of `index` that is in `bag`.

    None when the bag is empty (a method without neighbours), the cluster has nobody else, or there
    is no other cluster.
    """
    others = clusters.count(clusters[index]) - 1
    if not bag or not others or _single(clusters):
        return None
    return sum(clusters[j] == clusters[index] for j in bag) / others


def _single(clusters: Sequence[int]) -> bool:
    return all(cluster == clusters[0] for cluster in clusters)


def clusters_found(bags: Mapping[int, Collection[int]]) -> int:
    """Return the number of components of the graph of mutual bag membership.

    Its vertices are the keys, peers with their bags; two are joined when each is in the other's.
    """
    sets = {i: set(bag) for i, bag in bags.items()}
    unseen, components = set(sets), 0
    while unseen:
        components += 1
        reached = [unseen.pop()]
        while reached:
            i = reached.pop()
            mutual = {j for j in unseen & sets[i] if i in sets[j]}
            unseen -= mutual
            reached += mutual
    return components

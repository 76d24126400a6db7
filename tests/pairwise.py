"""Rows of options in which every value of one meets every value of each other."""

import itertools
from typing import Any

import numpy as np

Row = dict[str, Any]
Factors = dict[str, list[Any]]


def pairwise(factors: Factors) -> list[Row]:
    """Returns rows in which every two values of different factors meet."""
    names = list(factors)
    random = np.random.default_rng(0)

    def pairs(row: Row) -> set[Any]:
        return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}

    missing = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in factors[a]
        for y in factors[b]
    }
    rows = []
    while missing:
        # The best of some random rows, each of which holds a pair that is missing.
        seed = min(missing, key=repr)
        candidates = []
        for _ in range(40):
            row = {n: v[random.integers(len(v))] for n, v in factors.items()}
            candidates.append(row | dict(seed))
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append(best)
    return rows


def assert_pairwise(rows: list[Row], factors: Factors) -> None:
    """Asserts that every two values of different factors meet in some row."""
    for a, b in itertools.combinations(factors, 2):
        met = {(row[a], row[b]) for row in rows}
        assert len(met) == len(factors[a]) * len(factors[b])


def ident(row: Row) -> str:
    """Returns the name of a row's test."""
    return "-".join(str(value) for value in row.values())

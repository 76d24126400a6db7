"""A tree that compiles fast: leaves that divide by the ranks, and others."""

from jaxzero._cli.bench.trees import Tree

TREE: Tree = {"kernel": (24, 16), "bias": (13,), "table": (3, 5, 7), "scale": (1,)}

import math

from jaxzero._cli.bench.trees import TREES, llama


def test_sizes_are_those_of_the_help() -> None:
    found = {}
    for name, tree in TREES.items():
        shapes = tree().values()
        found[name] = (len(shapes), sum(map(math.prod, shapes)))
    assert found == {
        "gpt2": (148, 124_439_808),
        "gpt2-quarter": (148, 15_184_704),
        "layer": (12, 444_864),
        "awkward": (72, 63_117_072),
        "small": (1000, 100_000),
    }


def test_a_layer_of_llama_8b_is_that_of_the_known_models() -> None:
    tree = llama(layers=2)
    assert len(tree) == 2 * 9
    assert sum(map(math.prod, tree.values())) == 2 * 218_112_000


def test_most_awkward_leaves_do_not_divide_by_two_ranks() -> None:
    odd = [math.prod(shape) % 2 for shape in TREES["awkward"]().values()]
    assert sum(odd) > len(odd) / 2

import pytest

from jaxzero import make_plan
from jaxzero._cli.models import MODELS, num_elements

PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-3.2-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
}


@pytest.mark.parametrize("name", MODELS)
def test_parameters_are_as_many_as_published(name: str) -> None:
    assert num_elements(MODELS[name]()) == PUBLISHED[name]


def test_every_layer_has_the_same_shapes() -> None:
    for model in MODELS.values():
        blocks = model()["blocks"]
        assert all(block == blocks[0] for block in blocks)
        assert make_plan(blocks[0], 8).padding_bytes == 0

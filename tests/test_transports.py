"""Which transport carries out a call, and what is said if none can."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxzero
from jaxzero import Policy, _ffi
from jaxzero._transports import choose

REASON = "this build of jaxzero has no CUDA module (see BUILD.md)"


@pytest.fixture
def without_cuda(monkeypatch):
    monkeypatch.setattr(_ffi, "cuda_obstacle", lambda: REASON)


@pytest.fixture
def with_cuda(monkeypatch):
    monkeypatch.setattr(_ffi, "cuda_obstacle", lambda: None)


@pytest.mark.parametrize("platform", [None, "cpu"])
def test_without_the_cuda_module_xla_is_taken(without_cuda, platform):
    choice = choose(Policy(), platform)
    assert choice.names == ("xla",)
    assert choice.reason == REASON


@pytest.mark.parametrize("transport", ["auto", "nccl", "xla"])
def test_gpus_without_the_cuda_module_are_refused(without_cuda, transport):
    """XLA would say that a custom call is not registered, on every rank."""
    with pytest.raises(NotImplementedError, match="JAXZERO_CUDA=on") as caught:
        choose(Policy(transport=transport), "gpu")
    assert REASON in str(caught.value)


def test_nccl_without_the_cuda_module_is_refused(without_cuda):
    with pytest.raises(NotImplementedError, match=r"no CUDA module.*'xla' or 'auto'"):
        choose(Policy(transport="nccl"), None)


def test_nccl_on_other_devices_is_refused(with_cuda):
    with pytest.raises(NotImplementedError, match=r"platform 'cpu'.*'xla' or 'auto'"):
        choose(Policy(transport="nccl"), "cpu")


def test_with_the_cuda_module_the_platform_decides_at_lowering(with_cuda):
    assert choose(Policy(), "gpu").names == ("nccl", "xla")
    assert choose(Policy(transport="nccl"), "gpu").names == ("nccl",)
    assert choose(Policy(transport="xla"), "gpu").names == ("xla",)


def test_a_call_knows_the_platform_of_its_mesh(mesh8, with_cuda):
    def reduce(leaf):
        return jaxzero.shard_grads(leaf, "data", policy=Policy(transport="nccl"))

    mapped = jax.shard_map(reduce, mesh=mesh8, in_specs=P(), out_specs=P("data"))
    with pytest.raises(NotImplementedError, match="platform 'cpu'"):
        jax.eval_shape(mapped, np.ones(8, np.float32))

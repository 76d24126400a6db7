"""What ranks are told, by platform."""

import pytest

from jaxzero._cli.launch import environment


def ranks(count: int, **inherited: str) -> list[dict[str, str]]:
    return [
        environment.rank_environment(rank, count, "127.0.0.1:1", inherited)
        for rank in range(count)
    ]


def test_cpu_devices_replace_an_inherited_count() -> None:
    (rank,) = ranks(1, XLA_FLAGS="--a=1 --xla_force_host_platform_device_count=8 --b=2")
    flags = environment.with_cpu_devices(rank, 3)["XLA_FLAGS"].split()
    assert flags == ["--a=1", "--b=2", "--xla_force_host_platform_device_count=3"]


def test_a_gpu_for_each_rank_is_an_ordinary_nccl_job() -> None:
    both = [environment.with_gpu(rank, 2) for rank in ranks(2)]
    assert [rank[environment.LOCAL_DEVICE_IDS] for rank in both] == ["0", "1"]
    assert all("NCCL_HOSTID" not in rank for rank in both)


def test_ranks_on_gpus_have_a_cpu_device_to_call_python_back_from() -> None:
    assert environment.with_gpu(*ranks(1), 1)["JAX_PLATFORMS"] == "cuda,cpu"


def test_ranks_that_share_a_gpu_pretend_to_be_on_different_hosts() -> None:
    four = [environment.with_gpu(rank, 2) for rank in ranks(4)]
    assert [rank[environment.LOCAL_DEVICE_IDS] for rank in four] == list("0101")
    assert len({rank["NCCL_HOSTID"] for rank in four}) == 4
    assert {rank["XLA_PYTHON_CLIENT_PREALLOCATE"] for rank in four} == {"false"}


@pytest.mark.parametrize(
    ("visible", "count"),
    [("", 0), ("-1", 0), ("0", 1), ("2,3", 2), ("0,-1,1", 1), ("GPU-aa,GPU-bb", 2)],
)
def test_visible_gpus_are_counted_as_cuda_does(
    visible: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert environment.count_gpus() == count

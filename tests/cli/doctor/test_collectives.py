"""What `python -m jaxzero doctor` says of XLA's collectives extension."""

import sys
import threading
from types import ModuleType

import pytest

from jaxzero._cli.doctor import collectives as doctor_collectives
from jaxzero._cli.doctor.limit import TimeLimit

GPU = object()


@pytest.mark.parametrize(
    ("offer", "value", "fix"),
    [
        ([1, 1, 0, 1], "offers 0.1", None),
        ([1, 1, 0, 7], "offers 0.7", None),
        ([0, 0, 0, 0], "offers none", doctor_collectives.UPGRADE),
        ([1, 0, 0, 0], "offers 0.0, which does not fit", doctor_collectives.UPGRADE),
        (
            [1, 0, 1, 0],
            "offers 1.0, which does not fit",
            doctor_collectives.NEWER_JAXZERO,
        ),
    ],
    ids=["same", "later", "none", "too-old", "too-new"],
)
def test_collectives_extension_must_be_one_that_works_here(
    monkeypatch: pytest.MonkeyPatch, offer: list[int], value: str, fix: str | None
) -> None:
    plant_module(monkeypatch)
    monkeypatch.setattr(doctor_collectives, "offer", lambda *_: offer)
    [fact] = doctor_collectives.collectives([GPU], TimeLimit(60))
    assert fact.value == f"built with 0.1; the CUDA plugin {value}"
    assert fact.fix == fix


def test_collectives_extension_shows_on_a_device_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant_module(monkeypatch)
    [fact] = doctor_collectives.collectives([], TimeLimit(60))
    assert fact.value.startswith("built with 0.1; only a CUDA device")
    assert fact.fix is None
    monkeypatch.setitem(sys.modules, "jaxzero._cuda", None)
    assert list(doctor_collectives.collectives([GPU], TimeLimit(60))) == []


def test_gpu_that_does_not_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    plant_module(monkeypatch)
    end = threading.Event()
    monkeypatch.setattr(doctor_collectives, "offer", lambda *_: end.wait())
    limit = TimeLimit(0.2)
    [fact] = doctor_collectives.collectives([GPU], limit)
    assert fact.value == "built with 0.1; no end of start within 0.2 s"
    assert fact.fix == doctor_collectives.CHECK_DEVICE
    assert limit.was_exceeded
    end.set()


def test_built_module_says_what_it_was_built_with() -> None:
    module = pytest.importorskip("jaxzero._cuda")
    [fact] = doctor_collectives.collectives([], TimeLimit(60))
    assert fact.value.startswith("built with 0.")
    assert module.collectives_probe() is not None


def plant_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("jaxzero._cuda")
    module.__dict__["collectives_version"] = (0, 1)
    monkeypatch.setitem(sys.modules, "jaxzero._cuda", module)

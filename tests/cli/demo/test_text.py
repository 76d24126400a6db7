import sysconfig
from pathlib import Path

import numpy as np
import pytest

from jaxzero._cli.demo.text import batch_at, load_corpus


def test_corpus_is_the_standard_librarys_source() -> None:
    corpus = load_corpus()
    assert len(corpus) > 1_000_000
    source = (Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes()
    assert source in corpus.tobytes()


def test_python_without_source_files_is_explained(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"no \*\.py in .*standard library"):
        load_corpus()


def test_batch_depends_on_the_seed_only() -> None:
    corpus = np.arange(256, dtype=np.uint8)
    first = batch_at(corpus, (3, 1), shape=(4, 2), length=8)
    assert first.shape == (4, 2, 9) and first.dtype == np.uint8
    np.testing.assert_array_equal(
        first, batch_at(corpus, (3, 1), shape=(4, 2), length=8)
    )
    assert (first != batch_at(corpus, (3, 2), shape=(4, 2), length=8)).any()


def test_windows_are_consecutive_and_reach_both_ends() -> None:
    corpus = np.arange(10, dtype=np.uint8)
    windows = batch_at(corpus, (0,), shape=(1000,), length=8)
    np.testing.assert_array_equal(windows - windows[:, :1], [range(9)] * 1000)
    assert set(windows[:, 0].tolist()) == {0, 1}

"""Training text that every machine has: the standard library's own source files."""

import pathlib
import sysconfig

import numpy as np
import numpy.typing as npt

type Bytes = npt.NDArray[np.uint8]


def load_corpus() -> Bytes:
    """Returns the top-level modules of the standard library, joined in name order.

    Raises:
        FileNotFoundError: this Python was installed without its source files.
    """
    folder = pathlib.Path(sysconfig.get_path("stdlib"))
    files = sorted(folder.glob("*.py"))
    if not files:
        raise FileNotFoundError(
            f"no *.py in {folder}: the demo trains on the standard library's source"
            " files, so it needs a Python installed with them"
        )
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)


def batch_at(
    corpus: Bytes, seed: tuple[int, ...], *, shape: tuple[int, ...], length: int
) -> Bytes:
    """Draws windows at random places; the same arguments give the same bytes.

    Returns:
        uint8[*shape, length + 1].
    """
    starts = np.random.default_rng(seed).integers(0, len(corpus) - length, shape)
    windows: Bytes = corpus[starts[..., None] + np.arange(length + 1)]
    return windows

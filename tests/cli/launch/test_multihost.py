"""Starts `tests/multihost` and small programs as several ranks on this machine."""

import contextlib
import random
import re
import socket
from pathlib import Path

import pytest
from cli.launch.ranks import launch

pytestmark = pytest.mark.multiprocess

MULTIHOST = Path(__file__).parents[2] / "multihost"

# shard_grads of float32[16, columns] on every rank, for programs to build on.
STEP = """
import os
{before}
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxzero
from jaxzero.distributed import initialize, started_by

initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",))
spread = NamedSharding(mesh, P("data"))
step = jax.jit(
    jax.shard_map(
        lambda g: jaxzero.shard_grads(g[0], "data"),
        mesh=mesh, in_specs=P("data"), out_specs=P("data"),
    )
)

def call(columns):
    shape = (mesh.size, 16, columns)
    ones = np.ones((1, 16, columns), np.float32)
    return step(jax.make_array_from_callback(shape, spread, lambda _: ones))

{after}
"""


def program(after: str, before: str = "") -> list[str]:
    return ["python", "-c", STEP.format(before=before, after=after)]


def test_the_tests_between_processes_pass() -> None:
    """With the fewest ranks that also make a mesh of two axes."""
    done = launch(
        *("-n", "4", "--timeout", "270", "--"),
        *("pytest", "-q", "-p", "no:cacheprovider", str(MULTIHOST)),
    )
    assert done.code == 0, done.output
    found = re.search(r"(\d+) passed.* in", done.output)
    assert found, done.output
    assert int(found[1]) >= 30


def test_a_program_that_ends_while_work_is_under_way_ends_cleanly() -> None:
    """Nothing but the interpreter's exit waits for the results.

    See: https://github.com/mpi4jax/mpi4jax/issues/22
    """
    done = launch(
        "-n", "4", "--timeout", "60", "--", *program("for _ in range(30): call(29)")
    )
    assert done.code == 0, done.output


def test_ranks_that_disagree_on_a_shape_end_with_an_error_or_the_time_limit() -> None:
    calls = """
call(29).block_until_ready()
print("agreed", flush=True)
call(29 if jax.process_index() == 0 else 33).block_until_ready()
call(29).block_until_ready()
"""
    done = launch("-n", "2", "--timeout", "20", "--", *program(calls))
    assert done.code != 0
    assert "agreed" in done.output
    assert done.seconds < 40


def test_a_rank_that_calls_less_often_is_found_by_the_time_limit() -> None:
    calls = (
        "for i in range(5 if jax.process_index() else 6): call(29).block_until_ready()"
    )
    done = launch("-n", "2", "--timeout", "10", "--", *program(calls))
    assert done.code == 124, done.output
    assert "still running of 2 ranks: 0, 1" in done.output
    assert done.seconds < 30


def slurm_job_with_a_free_port() -> int:
    """Returns a job number; jax derives the coordinator's port from it."""
    for job in random.sample(range(4096), 50):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("", 61440 + job))
            return job
    pytest.skip("no free port among those that jax uses under Slurm")


def test_slurm_tasks_join_each_other() -> None:
    """The variables of `srun`, as its tasks see them; its launcher is not needed."""
    job = slurm_job_with_a_free_port()
    before = f"""
rank = os.environ.pop("JAXZERO_PROCESS_ID")
os.environ.update(
    SLURM_JOB_ID="{job}", SLURM_STEP_NODELIST="127.0.0.1", SLURM_NTASKS="2",
    SLURM_STEP_NUM_TASKS="2", SLURM_STEP_NUM_NODES="1",
    SLURM_PROCID=rank, SLURM_LOCALID=rank,
)
"""
    after = "print(started_by(), call(29).shape, jax.process_count())"
    done = launch("-n", "2", "--timeout", "60", "--", *program(after, before))
    assert done.code == 0, done.output
    assert "slurm (16, 29) 2" in done.output

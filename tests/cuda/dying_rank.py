"""A program whose rank 2 kills itself between two reductions, for the launcher."""

import os
import signal

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxzero
from jaxzero.distributed import initialize

initialize()
mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
spec = PartitionSpec("data")
ones = np.ones((jax.device_count(), 1000, 8), np.float32)
grads = jax.make_array_from_callback(
    ones.shape, NamedSharding(mesh, spec), lambda index: ones[index]
)
step = jax.jit(
    jax.shard_map(
        lambda g: jaxzero.shard_grads(g[0], "data"),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )
)
for number in range(10):
    if number == 5 and jax.process_index() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    jax.block_until_ready(step(grads))
    print("step", number, flush=True)

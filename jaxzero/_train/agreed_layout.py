"""The layout of parameters that all processes of a run agree on."""

import math
from collections.abc import Callable

from jax.sharding import Mesh

from jaxzero._cut import CutTree, Shape
from jaxzero._layout import Layout
from jaxzero._make_layout import Globs, build_layout
from jaxzero._train.options import StepOptions
from jaxzero._train.params_layout import params_layout
from jaxzero._train.processes import check_processes_agree
from jaxzero._tree import PyTree


def agreed_layout(
    like: PyTree,
    options: StepOptions,
    mesh: Mesh,
    given: Layout | None,
    *,
    cuts: CutTree,
    min_shard_numel: int,
    layers: Globs,
    stacked: Globs,
) -> Layout:
    """Returns the layout; raises as `make_layout`, and for processes that differ.

    Args:
      like: the parameters, or their shapes and dtypes.
      options: axes and policy.
      mesh: the mesh.
      given: the layout that the caller made; None makes one here.
      cuts: as for `make_layout`, as are the others.
      min_shard_numel: likewise.
      layers: likewise.
      stacked: likewise.
    """
    try:
        layout = params_layout(
            given
            or build_layout(
                like,
                options.names,
                options.replicate,
                mesh.shape,
                what="params",
                cuts=_default_cut(options, mesh, min_shard_numel)
                if cuts is None
                else cuts,
                min_shard_numel=min_shard_numel,
                layers=layers,
                stacked=stacked,
            ),
            like,
            options.policy,
        )
    except (TypeError, ValueError) as error:
        # The others may have found nothing wrong, and would wait for this one.
        check_processes_agree("zero3", str(error))
        raise
    check_processes_agree("zero3", (layout.fingerprint, options.comparable))
    return layout


def _default_cut(
    options: StepOptions, mesh: Mesh, min_shard_numel: int
) -> Callable[[str, Shape], int | None]:
    """Returns the cut of leaves that nobody chose one for."""
    ranks = math.prod(mesh.shape[name] for name in options.names)

    def cut(path: str, shape: Shape) -> int | None:
        is_large = math.prod(shape) >= min_shard_numel
        # A loss may scan over it: each layer has shards of its own.
        return 1 if len(shape) > 2 and shape[1] % ranks == 0 and is_large else None

    return cut

"""The layout of parameters that all processes of a run agree on."""

from jax.sharding import Mesh

from jaxzero._cut import CutTree
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
                cuts=cuts,
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

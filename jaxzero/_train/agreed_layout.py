"""The layout of parameters that all processes of a run agree on."""

import math

from jax.sharding import Mesh

from jaxzero._cut import CutTree
from jaxzero._train.layout import Layout
from jaxzero._train.make_layout import Globs, make_layout
from jaxzero._train.options import StepOptions
from jaxzero._train.processes import check_processes_agree
from jaxzero._tree import PyTree


def agreed_layout(
    like: PyTree,
    options: StepOptions,
    mesh: Mesh,
    *,
    cuts: CutTree,
    layers: Globs,
    stacked: Globs,
) -> Layout:
    """Returns the layout; raises as `make_layout`, and for processes that differ."""
    try:
        layout = make_layout(
            like,
            options.names,
            math.prod(mesh.shape[name] for name in options.names),
            policy=options.policy,
            cuts=cuts,
            layers=layers,
            stacked=stacked,
        )
    except (TypeError, ValueError) as error:
        # The others may have found nothing wrong, and would wait for this one.
        check_processes_agree("zero3", str(error))
        raise
    check_processes_agree("zero3", (layout.fingerprint, options.comparable))
    return layout

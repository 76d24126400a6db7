"""zero3: a whole ZeRO-3 training step from a loss function and an optimizer."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxzero._axis import AxisName, axis_names
from jaxzero._cut import CutTree
from jaxzero._layout import Layout
from jaxzero._make_layout import Globs, check_alone, check_sizes, checked_numel
from jaxzero._norms.loss_scale import LossScale, LossScaleState
from jaxzero._policy import Policy
from jaxzero._train import batch as placing
from jaxzero._train import export, restore
from jaxzero._train.agreed_layout import agreed_layout
from jaxzero._train.batch import Batches
from jaxzero._train.batch_dims import BatchDims
from jaxzero._train.optimizer import ShardedOptimizer
from jaxzero._train.options import (
    LossFn,
    Optimizer,
    StepOptions,
    Sync,
    check_choices,
    check_mesh,
    checked_clip,
)
from jaxzero._train.place import param_places, place_leaves
from jaxzero._train.programs import birth, loss_of_parts, loss_program, step_program
from jaxzero._train.state import Metrics, TrainState
from jaxzero._tree import PyTree


def zero3(
    loss_fn: LossFn,
    optimizer: Optimizer,
    mesh: Mesh,
    axis_name: AxisName | Layout = "data",
    *,
    policy: Policy = Policy(),  # noqa: B008  (frozen)
    cuts: CutTree = None,
    min_shard_numel: int = 0,
    replicate_axis: AxisName | None = None,
    layers: Globs = (),
    stacked: Globs = (),
    accumulate: int = 1,
    sync: Sync = "each",
    clip_norm: float | None = None,
    loss_scale: LossScale | None = None,
    skip_nonfinite: bool = False,
    has_aux: bool = False,
    batch_dims: BatchDims = 0,
) -> "Zero3":
    """Makes a training step whose parameters, gradients and optimizer are sharded.

    The step is jitted and owns its state (it is donated). It is made of the public
    functions: `gather_params`, `jax.grad`, `shard_grads`, and the optimizer on shards.

    Args:
      loss_fn: (params, batch) -> mean loss over the batch, a real scalar; the same
        function as on one device. It sees the examples of one device. It may use
        collectives over the axes. A loss that they make equal on all devices counts
        once under a mean; a policy that adds up losses refuses it, where its type
        says so, and expects each device's own part.
      optimizer: an optax transformation, or anything with its `init` and `update`. It
        runs on shards, so it must treat all elements of a leaf alike (adamw, lion,
        sgd, ...); one that does not is refused by `init`. If its `update` asks, it gets
        `value`, the loss, and `grad`, before clipping. A leaf that is cut flat has one
        dimension there: choose what to decay by key path, not by `ndim`, or keep
        dimensions (`cuts=lambda path, shape: 0 if len(shape) > 1 else None`); else
        `init` refuses, too.
      mesh: mesh of all devices.
      axis_name: mesh axis, or tuple of axes, to shard over; or a `Layout` of the
        parameters, which then says all about cuts, replicas and layers.
      policy: dtypes of computing, wire and shards, what is summed, bucket sizes.
      cuts: as for `shard_grads`; for a stacked leaf, the cut of each layer.
      min_shard_numel: parameters with fewer elements, and no cut of their own, stay
        whole.
      replicate_axis: axis or axes along which shards are copies (hybrid sharding).
      layers: globs of key paths, such as `"blocks/*"`, of one layer each: `loss_fn`
        gets its shards and gives them to functions made by `gathered`.
      stacked: the same for layers stacked along dimension 0, for `lax.scan`.
      accumulate: microbatches that a batch is split into. Their gradients are added in
        the dtype of the shards: give 16-bit parameters `policy.shard_dtype`.
      sync: when gradients meet. `"each"`: after each microbatch, into shards.
        `"last"`: they are added on the device, in full size, and reduced once
        (1/accumulate of the wire bytes; N times the memory for gradients).
        `"replicas_last"`: reduced to shards after each, over replicas once.
      clip_norm: clip gradients to this global norm, a finite number above 0.
      loss_scale: multiply the loss by a dynamic scale (float16) and skip steps whose
        gradients are not finite.
      skip_nonfinite: skip such steps without a loss scale, too.
      has_aux: `loss_fn` returns (loss, aux), aux a pytree of real arrays.
      batch_dims: the dimension along which a leaf of a batch holds its examples, or
        None for one that goes whole to every device, such as class weights; one for
        all, a pytree prefix of them, or a callable (path, shape) that returns one.
        Leaves without dimensions always go whole.

    Returns:
      A `Zero3` with `init`, `step`, `evaluate` and checkpoints.

    Raises:
      ValueError: for an axis that the mesh does not have, mesh axes that are not
        named, or options out of range or at odds.
      TypeError: for an option of the wrong type.

    Example:
      >>> import jax, jax.numpy as jnp, jaxzero, optax
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> def loss_fn(params, batch):
      ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
      >>> zero = jaxzero.zero3(loss_fn, optax.sgd(0.1), mesh)
      >>> state = zero.init({"w": jnp.zeros(2)})
      >>> batch = {"x": jnp.eye(2), "y": jnp.ones(2)}
      >>> state, metrics = zero.step(state, batch)
      >>> print(metrics.loss, state.params["w"])
      1.0 [0.1 0.1]
    """
    given = None
    if isinstance(axis_name, Layout):
        given = axis_name
        check_alone("zero3", cuts=cuts, replicate_axis=replicate_axis)
        check_alone("zero3", layers=layers or None, stacked=stacked or None)
        check_alone("zero3", min_shard_numel=min_shard_numel or None)
        check_sizes(given, mesh.shape, "zero3")
        names, replicate = given.names, given.replicate
    else:
        names, replicate = axis_names(axis_name, replicate_axis, "zero3")
    check_mesh(mesh, names, replicate)
    missing = "" if replicate else "replicate_axis"
    check_choices("zero3", accumulate, sync, layers, stacked, missing)
    return Zero3(
        mesh,
        StepOptions(
            loss_fn=loss_fn,
            optimizer=optimizer,
            names=names,
            replicate=replicate,
            devices=math.prod(mesh.shape[name] for name in names + replicate),
            policy=policy,
            accumulate=accumulate,
            sync=sync,
            clip_norm=checked_clip(clip_norm),
            loss_scale=loss_scale,
            skip_nonfinite=skip_nonfinite,
            has_aux=has_aux,
            batch_dims=batch_dims,
        ),
        given=given,
        cuts=cuts,
        min_shard_numel=checked_numel("zero3", min_shard_numel),
        layers=layers,
        stacked=stacked,
    )


class Zero3:
    """A ZeRO-3 training run; made by `zero3`. What changes is in the `TrainState`."""

    def __init__(
        self,
        mesh: Mesh,
        options: StepOptions,
        *,
        given: Layout | None,
        cuts: CutTree,
        min_shard_numel: int,
        layers: Globs,
        stacked: Globs,
    ) -> None:
        self._mesh = mesh
        self._options = options
        self._optimizer = ShardedOptimizer(options.optimizer, mesh)
        self._given = given
        self._cuts = cuts
        self._min_shard_numel = min_shard_numel
        self._layers = layers
        self._stacked = stacked
        self._batches = Batches(mesh, options)
        self._step = step_program(options, mesh, self._optimizer)
        self._loss = loss_program(options, mesh)

    @property
    def batch_sharding(self) -> NamedSharding:
        """Sharding of a leaf with examples along dimension 0: over all devices.

        Several processes build their batches with it, from what each has read (see
        `batch_shardings`). Or all give the same NumPy arrays.
        """
        return NamedSharding(self._mesh, placing.batch_spec(self._options, 0))

    def batch_shardings(self, batch: PyTree) -> PyTree:
        """Returns the sharding of each leaf of a batch, as `batch_dims` says.

        Several processes build a batch from what each has read, `local`:
        `jax.tree.map(jax.make_array_from_process_local_data, shardings, local)`.
        """
        return placing.batch_shardings(batch, self._options, self._mesh)

    def init(self, params: PyTree | Callable[..., PyTree], *args: Any) -> TrainState:
        """Returns the state of step 0, born sharded.

        Args:
          params: pytree of parameters in true shape: NumPy arrays, the same on every
            process, or arrays on any devices, which send them to each other; or the
            function that makes them, which then runs under `jit` and writes
            shards: full parameters never exist on one device together.
          args: arguments of the function, such as a random key.

        Raises:
          ValueError: for an optimizer that mixes elements of a leaf, globs of `layers`
            without a match, or processes whose parameters differ in structure.
          TypeError: for leaves that are no floating-point arrays.
        """
        if _is_function(params):
            layout = self._layout(jax.eval_shape(params, *args))
            placed = birth(layout, self._mesh, params)(*args)
        else:
            layout = self._layout(params)
            leaves = jax.tree.leaves(params)
            placed = place_leaves(layout, param_places(layout), leaves, self._mesh)
        sharded = layout.unflatten(placed)
        return TrainState(
            step=self._everywhere(jnp.zeros((), jnp.int32)),
            params=sharded,
            opt_state=self._optimizer.init(layout, sharded),
            loss_scale=self._everywhere(self._first_loss_scale()),
            layout=layout,
        )

    def step(self, state: TrainState, batch: PyTree) -> tuple[TrainState, Metrics]:
        """Takes one optimizer step.

        Args:
          state: the state; it is donated, so it cannot be used again.
          batch: pytree of arrays whose dimension 0 (or what `batch_dims` says) is the
            examples of all devices and microbatches; leaves without dimensions, such
            as a random key, go to every device.

        Returns:
          The next state, and the `Metrics` of this step.

        Raises:
          ValueError: for a batch that cannot be split over devices and microbatches,
            leaves with different numbers of examples, or a first batch that differs
            between processes.
        """
        placed = self._batches.place(batch)
        result: tuple[TrainState, Metrics] = self._step(state, placed)
        return result

    def evaluate(
        self,
        state: TrainState,
        batch: PyTree,
        loss_fn: LossFn | None = None,
        *,
        uneven: bool = False,
    ) -> Any:
        """Returns the loss of a batch, without gradients; the state stays as it is.

        Args:
          state: a state.
          batch: as for `step`, split over devices and microbatches in the same way.
          loss_fn: a function in place of that of the run, called likewise, such as
            one without dropout. Give the same object each time: a new one compiles.
          uneven: take any number of examples, such as those of a last batch. Loss and
            auxiliary results must be plain means over examples, because they are those
            of parts, weighted by their examples. Those left over when each device has
            as many, fewer than devices, are computed one by one on every device.

        Returns:
          The loss, a float32 scalar equal on every device; with `has_aux`, the pair
          (loss, aux). Both are reduced as in `Metrics`.

        Raises:
          ValueError: as `step`; for `uneven`, also with a policy other than a mean.
        """
        loss_fn = self._options.loss_fn if loss_fn is None else loss_fn
        place = self._batches.place_uneven if uneven else self._batches.place_even
        loss, aux = loss_of_parts(self._loss, loss_fn, state, place(batch))
        return (loss, aux) if self._options.has_aux else loss

    def lower(
        self,
        state: TrainState,
        batch: PyTree,
        *,
        platforms: tuple[str, ...] | None = None,
    ) -> jax.stages.Lowered:
        """Returns the step lowered, for its cost and memory before it runs.

        Args:
          state: a state, or its shapes from `abstract_state`.
          batch: a batch, or its shapes.
          platforms: such as ("cuda",), to compile for a mesh of described devices.
        """
        shapes = placing.abstract_batch(batch, self._options, self._mesh)
        traced: jax.stages.Traced = self._step.trace(state, shapes)
        lowered: jax.stages.Lowered = traced.lower(lowering_platforms=platforms)
        return lowered

    def abstract_state(
        self, params: PyTree | Callable[..., PyTree], *args: Any
    ) -> TrainState:
        """Returns the state with a `jax.ShapeDtypeStruct` in place of each array.

        Args:
          params: as for `init`; shapes suffice.
          args: arguments of the function.
        """
        layout = self._layout(
            jax.eval_shape(params, *args) if _is_function(params) else params
        )
        everywhere = NamedSharding(self._mesh, P())

        def abstract(value: Any) -> Any:
            return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=everywhere)

        return TrainState(
            step=abstract(jax.ShapeDtypeStruct((), jnp.int32)),
            params=layout.abstract(self._mesh),
            opt_state=self._optimizer.abstract(layout),
            loss_scale=jax.tree.map(abstract, self._first_loss_scale()),
            layout=layout,
        )

    def export_state(self, state: TrainState) -> dict[str, PyTree]:
        """Returns the state in true shapes, for a checkpoint.

        `import_state` takes it on any other mesh, of any number of devices.

        Args:
          state: the state; it stays usable.

        Returns:
          Dict of "step", "params", "opt_state" and "loss_scale"; the arrays of
          parameters and moments in true shape and stored dtype, spread over the mesh
          along the first dimension that it divides (whole where there is none).
        """
        return export.to_true(state, self._mesh)

    def import_state(
        self,
        exported: dict[str, PyTree],
        *,
        like: PyTree | None = None,
        reset_optimizer: bool = False,
    ) -> TrainState:
        """Returns the state that `export_state` returned, here or on another mesh.

        Args:
          exported: the dict, of arrays on any devices or of NumPy arrays.
          like: the parameters or their true shapes and dtypes, where those of
            `exported` differ in dtype (`policy.shard_dtype`) or have become dicts
            in place of modules; leaves are then found by name.
          reset_optimizer: start the optimizer anew, as `init` does, whatever state of
            one `exported` holds. The step goes on; schedules start again, because
            optimizers count for themselves.

        Returns:
          A state in the layout of this mesh and policy. A loss scale that `exported`
          lacks starts anew.

        Raises:
          ValueError: naming a part or leaf that is missing, that this optimizer and
            `like` do not have, or whose shape differs.
        """
        layout = self._layout(restore.saved_params(exported) if like is None else like)
        first = self._first_loss_scale()
        opt_shapes = None if reset_optimizer else self._optimizer.shapes(layout)
        placed = restore.from_true(exported, layout, opt_shapes, first, self._mesh)
        if reset_optimizer:
            placed["opt_state"] = self._optimizer.init(layout, placed["params"])
        placed.setdefault("loss_scale", self._everywhere(first))
        return TrainState(**placed, layout=layout)

    def export_template(
        self, params: PyTree | Callable[..., PyTree], *args: Any
    ) -> dict[str, PyTree]:
        """Returns shapes and shardings of what `export_state` returns.

        For checkpoint libraries that restore into a template, such as orbax.

        Takes what `init` takes; shapes suffice.
        """
        return export.template(self.abstract_state(params, *args), self._mesh)

    def _layout(self, like: PyTree) -> Layout:
        return agreed_layout(
            like,
            self._options,
            self._mesh,
            self._given,
            cuts=self._cuts,
            min_shard_numel=self._min_shard_numel,
            layers=self._layers,
            stacked=self._stacked,
        )

    def _first_loss_scale(self) -> LossScaleState | None:
        scaling = self._options.loss_scale
        return None if scaling is None else scaling.init()

    def _everywhere(self, tree: PyTree) -> PyTree:
        return jax.device_put(tree, NamedSharding(self._mesh, P()))


def _is_function(params: Any) -> bool:
    # Modules of parameters may be callable too, but they are no leaves.
    return callable(params) and jax.tree_util.all_leaves([params])

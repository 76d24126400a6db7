"""ZeRO-3 gradient sharding for JAX: bucketed, dtype-aware reduce-scatter."""

from importlib.metadata import PackageNotFoundError as _PackageNotFoundError
from importlib.metadata import version as _version

from jaxzero import _interrupt as _interrupt  # first, before JAX is imported
from jaxzero._apply_layers import apply_layers as apply_layers
from jaxzero._collectives.gather_params import gather_params as gather_params
from jaxzero._collectives.make_plan import make_plan as make_plan
from jaxzero._collectives.shard_grads import shard_grads as shard_grads
from jaxzero._collectives.shard_params import shard_params as shard_params
from jaxzero._collectives.shard_params import unshard_params as unshard_params
from jaxzero._ffi import CUSTOM_CALLS as CUSTOM_CALLS
from jaxzero._ffi import register as register
from jaxzero._gathered import gathered as gathered
from jaxzero._layout import Layout as Layout
from jaxzero._make_layout import make_layout as make_layout
from jaxzero._memory.estimate import DeviceBytes as DeviceBytes
from jaxzero._memory.estimate import MemoryEstimate as MemoryEstimate
from jaxzero._memory.estimate import estimate_memory as estimate_memory
from jaxzero._norms.clip import GradientTransformation as GradientTransformation
from jaxzero._norms.clip import clip_by_global_norm as clip_by_global_norm
from jaxzero._norms.global_norm import all_finite as all_finite
from jaxzero._norms.global_norm import global_norm as global_norm
from jaxzero._norms.loss_scale import LossScale as LossScale
from jaxzero._norms.loss_scale import LossScaleState as LossScaleState
from jaxzero._norms.stats import Stats as Stats
from jaxzero._plan import ReducePlan as ReducePlan
from jaxzero._policy import Policy as Policy
from jaxzero._train.state import Metrics as Metrics
from jaxzero._train.state import TrainState as TrainState
from jaxzero._train.zero3 import Zero3 as Zero3
from jaxzero._train.zero3 import zero3 as zero3

try:
    __version__ = _version("jaxzero")
except _PackageNotFoundError:
    # A source folder that was never installed: doctor must be able to say so.
    __version__ = "0+unknown"

"""Plans: which leaf travels in which bucket, at which offset, and why. No JAX."""

from jaxzero._plan.plan import GatherPlan as GatherPlan
from jaxzero._plan.plan import Plan as Plan
from jaxzero._plan.plan import ReducePlan as ReducePlan
from jaxzero._plan.planner import plan_gather as plan_gather
from jaxzero._plan.planner import plan_reduce as plan_reduce
from jaxzero._plan.types import Bucket as Bucket
from jaxzero._plan.types import LeafSpec as LeafSpec
from jaxzero._plan.types import Limits as Limits
from jaxzero._plan.types import Move as Move
from jaxzero._plan.types import Route as Route
from jaxzero._plan.types import Slot as Slot

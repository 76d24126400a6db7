"""Environment variables that tell a rank its job; the launcher sets them."""

COORDINATOR = "JAXZERO_COORDINATOR"
NUM_PROCESSES = "JAXZERO_NUM_PROCESSES"
PROCESS_ID = "JAXZERO_PROCESS_ID"
LOCAL_DEVICE_IDS = "JAXZERO_LOCAL_DEVICE_IDS"
"""Comma-separated numbers of the GPUs that a rank may use; unset on CPU."""

SLURM_STEP_NUM_TASKS = "SLURM_STEP_NUM_TASKS"
"""Set by `srun`; 1 in an interactive shell, whatever the size of its allocation."""

"""Tests on several processes.

`python -m jaxzero.testing.launch -n 4 -- pytest tests/multihost` runs a program as
several ranks on one machine; `srun` runs it as several ranks of a cluster. Either
way the program calls `initialize()` once, before its first use of a device.
"""

from jaxzero.testing._distributed import exit_on_failure as exit_on_failure
from jaxzero.testing._distributed import initialize as initialize
from jaxzero.testing._distributed import started_by as started_by

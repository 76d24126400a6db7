"""``python -m jaxzero demo``: a ZeRO-3 training run on the standard library's text."""

from collections.abc import Sequence

import jax

from jaxzero._cli.arguments import UsageError
from jaxzero._cli.demo.options import demo_parser, parse_options


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns its exit code."""
    parser = demo_parser()
    try:
        options = parse_options(parser, arguments)
        _configure_jax(options.devices)
        # Imported late: it needs optax, which the options were just checked for.
        from jaxzero._cli.demo.run import run_demo

        return run_demo(options)
    except UsageError as error:
        parser.error(str(error))


def _configure_jax(devices: int) -> None:
    """Gives this process that many CPU devices, whatever the environment says."""
    jax.config.update("jax_enable_x64", False)
    try:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", devices)
    except RuntimeError as error:
        found = len(jax.devices("cpu"))
        if found < devices:
            raise UsageError(
                f"JAX already runs here with {found} CPU devices; --devices {devices}"
                " needs a fresh process"
            ) from error

"""A time limit for `doctor`'s checks on devices, which may wait for ever."""

import concurrent.futures
import threading
from collections.abc import Callable


class TimeLimitError(Exception):
    """Work that did not end in time; its text names the step that it was at."""


class TimeLimit:
    """Runs work that may hang.

    Nothing can end a thread that waits inside XLA or NCCL, so work that hangs stays
    behind, and the process must then be left by `os._exit`.

    Attributes:
        seconds: the most that one piece of work may take.
        was_exceeded: whether work stayed behind.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.was_exceeded = False

    def run[T](self, work: Callable[[Callable[[str], None]], T]) -> T:
        """Returns what `work` returns; raises what it raises.

        Args:
            work: is passed a function that it calls with the name of each step
                before it takes it.

        Raises:
            TimeLimitError: if the work did not end in time.
        """
        steps = ["start"]
        future = concurrent.futures.Future[T]()

        def carry_out() -> None:
            try:
                future.set_result(work(steps.append))
            except BaseException as error:
                future.set_exception(error)

        # A daemon: an executor's threads are waited for when Python exits.
        threading.Thread(target=carry_out, daemon=True).start()
        done, _ = concurrent.futures.wait([future], self.seconds)
        if not done:
            self.was_exceeded = True
            raise TimeLimitError(f"no end of {steps[-1]} within {self.seconds:g} s")
        return future.result()

"""ZeRO-3 of any program: its units, and the schedule that gathers them in turn."""

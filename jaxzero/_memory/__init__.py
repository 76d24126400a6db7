"""What a ZeRO-3 step needs of a device's memory, from its plans alone."""

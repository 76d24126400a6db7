"""Between leaves and shards: the calls that move them, and their derivatives."""

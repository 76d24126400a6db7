"""What `python -m jaxzero bench` and the programs of `benchmarks/` share."""

"""`python -m jaxzero bench`; programs of `benchmarks/` use its parts too."""

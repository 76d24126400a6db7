"""`python -m jaxzero demo`."""

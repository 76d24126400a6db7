"""`python -m jaxzero launch`."""

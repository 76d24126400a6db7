"""`python -m jaxzero doctor`."""

"""`python -m jaxzero plan`."""

"""The commands of ``python -m jaxzero``; each module is imported only when run."""

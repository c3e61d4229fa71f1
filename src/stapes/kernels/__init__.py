"""Triton kernels, each with a plain-torch reference beside it, compiled for every GPU of the table in ``targets``."""

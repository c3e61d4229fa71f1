"""Tokenizers, normalisers and subtitle writers."""

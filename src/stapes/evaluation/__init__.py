"""Measure recognisers on recordings with known words, and compare what was measured."""

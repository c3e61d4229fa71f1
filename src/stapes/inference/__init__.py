"""Engines, the scheduler that feeds them, and long recordings."""

"""Model files of every origin, and names for them."""

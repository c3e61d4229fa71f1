"""Token rules, searches and alignments: pure functions over tensors."""

"""What we claim, for anyone to measure again: one suite behind every figure that is published."""

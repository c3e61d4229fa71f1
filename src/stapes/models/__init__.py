"""Neural networks in plain PyTorch, one model a file."""

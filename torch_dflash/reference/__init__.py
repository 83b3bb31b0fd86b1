"""The algorithms in plain PyTorch, float64, slow and obvious; never imports the operators."""

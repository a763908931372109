"""Contains the compiled ops, their reference implementations in PyTorch, and the code that builds the ops."""

"""Contains the compiled ops, their reference in plain torch, and the code that builds them."""

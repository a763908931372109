"""The tests; a package, so that no other package of this name on the path is taken for it."""

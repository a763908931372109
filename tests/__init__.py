"""The tests are a package, so that no other package called ``tests`` is imported instead."""

"""The ``rdmacm`` command: one module for each of its tools."""

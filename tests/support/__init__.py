"""What the tests stand on: networks in namespaces and in memory, a name server that says what it is told, helpers.

Child processes import parts of it, so this module imports nothing: pytest alone would cost each a quarter of a second.
"""

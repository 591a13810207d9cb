"""What the tests stand on: hosts made of network namespaces, and a name server that says what it is told."""

"""Protocol engines and wire formats: no socket, no clock, no thread, no randomness of their own."""

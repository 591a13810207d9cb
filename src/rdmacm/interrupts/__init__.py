"""Ctrl-C, signal handlers and finalizers: when they may run."""

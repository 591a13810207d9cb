"""Random draws of two programs that connect, on a link with faults: the draws, their programs, and their verdicts."""

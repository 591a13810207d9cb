"""What makes things happen: one lock, one clock, timers, and the threads that wait."""

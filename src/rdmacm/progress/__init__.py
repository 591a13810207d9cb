"""Progress of one provider: its lock and clock, timers, and the threads that wait."""

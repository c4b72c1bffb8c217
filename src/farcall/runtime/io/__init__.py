"""The I/O thread, its timers, and waiting without harm."""

"""The I/O thread, its timers, the role of the reader, and waits that Ctrl-C can end without harm."""

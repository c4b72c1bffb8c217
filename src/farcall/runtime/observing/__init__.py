"""The counters, events, profiling hooks and observers of a running node."""

"""What a cluster does, seen from inside and outside: counters, who waits for whom, logs, profiles and traces."""

"""The work of a cluster, seen from inside and outside: metrics, waiting calls, logs, profiles and traces."""

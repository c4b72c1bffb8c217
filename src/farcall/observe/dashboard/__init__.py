"""The live page: the work of a cluster, in a browser. ``farcall dashboard``, or the option ``dashboard_port``."""

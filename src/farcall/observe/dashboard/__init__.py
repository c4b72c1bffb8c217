"""The live page: what a cluster does, in a browser. ``farcall dashboard``, or the option ``dashboard_port``."""

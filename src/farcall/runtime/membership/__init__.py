"""Failure detection, the reactions to members that come and go, and graceful shutdown."""

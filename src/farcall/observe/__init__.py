"""What a cluster does, seen from outside of it: profiles and traces."""

"""What a running node counts and remembers."""

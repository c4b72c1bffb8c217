"""The way to one peer: its connections, and what goes over them."""

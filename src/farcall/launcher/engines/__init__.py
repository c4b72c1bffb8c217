"""One file for each site: how its own means start worker processes, say how these are, and end them."""

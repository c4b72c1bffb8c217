"""How members find each other."""

"""How members find each other: through a store, or at a member's address."""

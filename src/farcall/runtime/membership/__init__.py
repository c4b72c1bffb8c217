"""Who is a member, who hears of it, and the way out."""

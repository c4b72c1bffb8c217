"""The members that messages go to."""

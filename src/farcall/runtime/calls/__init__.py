"""Calls made here and calls served here."""

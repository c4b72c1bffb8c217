"""``farcall doctor``: does farcall work on this machine, and between it and others? If not, what is to be done?"""

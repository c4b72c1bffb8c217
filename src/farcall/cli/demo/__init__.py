"""``farcall demo``: parameter servers and trainers on this machine; one server is killed and comes back.

task.py       what is learned, and the model
workers.py    what runs on parameter servers and trainers
play.py       the course of the demo: who is started, asked, killed, recorded
figures.py    what was measured
picture.py    the figures as an image
show.py       what the user sees, and where the files go
"""

"""``farcall demo``: parameter servers and trainers on this machine; one server is killed and comes back.

training.py   the task, the model, its servers and trainers
play.py       the course of the demo: workers started, asked, killed, recorded; and the figures
picture.py    the figures as an image
show.py       the screen, and the files
"""

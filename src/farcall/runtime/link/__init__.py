"""The link to one peer: its connections, and the frames that go over them."""

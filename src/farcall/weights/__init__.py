"""Published weights: a model's tensors as whole versions, for every member to read."""

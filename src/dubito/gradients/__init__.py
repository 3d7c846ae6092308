"""Gradient norms of every image and every layer, from one backward pass of a whole batch."""

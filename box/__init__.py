"""What sets up the box and the server. The daemon loads nothing of it."""

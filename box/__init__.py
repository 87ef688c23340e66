"""What sets up the box and the server. The daemon loads nothing of it."""


class Refused(Exception):
    """Why nothing is changed, and what would be right."""


class Failed(Exception):
    """What failed, and what to do."""
